# SPDX-License-Identifier: Apache-2.0
# What all test folders share: how a GoogleTest binary is made and how tests are labelled.
#
# Labels: `quick` runs in under a minute in total and needs no CUDA library; `full` is everything else that runs without a GPU;
# `gpu` needs one. `slow` marks the tests of `full` that the sanitizers leave out.
include(GoogleTest)

# tierkv_test(AREA LINK lib... [SLOW Suite.Case...] [FULL]): test_AREA from tests/AREA/*.cc, one ctest for each of its cases.
# Its cases are `quick`, but for those that SLOW names (patterns of --gtest_filter). FULL: none is.
function(tierkv_test area)
  cmake_parse_arguments(ARG "FULL" "" "LINK;SLOW" ${ARGN})
  file(GLOB sources CONFIGURE_DEPENDS ${area}/*.cc ${area}/*.h ${area}/support/*.cc ${area}/support/*.h)
  add_executable(test_${area} ${sources})
  target_link_libraries(test_${area} PRIVATE ${ARG_LINK} GTest::gtest GTest::gtest_main GTest::gmock)
  target_compile_definitions(test_${area} PRIVATE TIERKV_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  target_compile_options(test_${area} PRIVATE ${TIERKV_TEST_OPTIONS})
  target_precompile_headers(test_${area} REUSE_FROM tierkv_test_support)
  list(JOIN ARG_SLOW ":" slow)
  set(rest)
  if(slow)
    set(rest TEST_FILTER "-${slow}")
    tierkv_discover(${area} full TEST_FILTER "${slow}")
  endif()
  if(ARG_FULL)
    tierkv_discover(${area} full ${rest})
  else()
    tierkv_discover(${area} quick ${rest})
    add_dependencies(tierkv_quick test_${area})
  endif()
endfunction()

function(tierkv_discover area label)
  gtest_discover_tests(test_${area} ${ARGN} TEST_PREFIX ${area}. NO_PRETTY_VALUES DISCOVERY_TIMEOUT 60
                       TEST_LIST ${area}_${label} PROPERTIES TIMEOUT 600 LABELS ${label})
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
