# SPDX-License-Identifier: Apache-2.0
# What all test folders share: how a GoogleTest binary is made and how tests are labelled.
#
# Labels: `quick` runs in under a minute in total and needs no CUDA library; `full` is everything else that runs without a GPU;
# `gpu` needs one. `slow` marks the tests of `full` that the sanitizers leave out.
include(GoogleTest)

# tierkv_test(AREA LINK lib... [SLOW Suite.Case...] [APART file...] [FULL]): test_AREA from tests/AREA/*.cc, one ctest for each of
# its cases. Its cases are `quick`, but for those that SLOW names (patterns of --gtest_filter). FULL: none is. APART: these files of
# AREA become test_AREA_apart, of which no case is quick, so that quick tests do without compiling them.
function(tierkv_test area)
  cmake_parse_arguments(ARG "FULL" "" "LINK;SLOW;APART" ${ARGN})
  file(GLOB sources CONFIGURE_DEPENDS ${area}/*.cc ${area}/*.h)
  file(GLOB support CONFIGURE_DEPENDS ${area}/support/*.cc ${area}/support/*.h)
  if(ARG_APART)
    list(TRANSFORM ARG_APART PREPEND ${CMAKE_CURRENT_SOURCE_DIR}/${area}/)
    list(REMOVE_ITEM sources ${ARG_APART})
    tierkv_test_program(test_${area}_apart SOURCES ${ARG_APART} ${support} LINK ${ARG_LINK})
    tierkv_discover(test_${area}_apart ${area} full)
  endif()
  tierkv_test_program(test_${area} SOURCES ${sources} ${support} LINK ${ARG_LINK})
  list(JOIN ARG_SLOW ":" slow)
  set(rest)
  if(slow)
    set(rest TEST_FILTER "-${slow}")
    tierkv_discover(test_${area} ${area} full TEST_FILTER "${slow}")
  endif()
  if(ARG_FULL)
    tierkv_discover(test_${area} ${area} full ${rest})
  else()
    tierkv_discover(test_${area} ${area} quick ${rest})
    add_dependencies(tierkv_quick test_${area})
  endif()
endfunction()

# tierkv_test_program(PROGRAM SOURCES file... LINK lib...)
function(tierkv_test_program program)
  cmake_parse_arguments(ARG "" "" "SOURCES;LINK" ${ARGN})
  add_executable(${program} ${ARG_SOURCES})
  target_link_libraries(${program} PRIVATE ${ARG_LINK} GTest::gtest GTest::gtest_main GTest::gmock)
  target_compile_definitions(${program} PRIVATE TIERKV_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  target_compile_options(${program} PRIVATE ${TIERKV_TEST_OPTIONS})
  target_precompile_headers(${program} REUSE_FROM tierkv_test_support)
endfunction()

function(tierkv_discover program area label)
  gtest_discover_tests(${program} ${ARGN} TEST_PREFIX ${area}. NO_PRETTY_VALUES DISCOVERY_TIMEOUT 60
                       TEST_LIST ${program}_${label} PROPERTIES TIMEOUT 600 LABELS ${label})
endfunction()

# Emulated kernels: see tests/support/README.md. FOLDER holds the stand-ins of their headers.
function(tierkv_emulated folder)
  set_source_files_properties(${ARGN} PROPERTIES
    INCLUDE_DIRECTORIES ${CMAKE_CURRENT_SOURCE_DIR}/support/emulator/${folder}
    COMPILE_OPTIONS "-Wno-unknown-pragmas;-fno-strict-aliasing;-U_FORTIFY_SOURCE"
    SKIP_PRECOMPILE_HEADERS ON)
endfunction()

# Every test of this folder that has neither `quick` nor `gpu` gets the label `full`. Tests that are discovered have theirs.
function(tierkv_label_tests)
  get_property(tests DIRECTORY PROPERTY TESTS)
  foreach(test IN LISTS tests)
    get_test_property(${test} LABELS labels)
    if(NOT "${labels}" MATCHES "quick|gpu|full")
      set_property(TEST ${test} APPEND PROPERTY LABELS full)
    endif()
  endforeach()
endfunction()

# Builds what the tests labelled `quick` need.
add_custom_target(tierkv_quick)
