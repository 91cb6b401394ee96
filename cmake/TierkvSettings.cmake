# SPDX-License-Identifier: Apache-2.0
# Compiler settings shared by every target, and tierkv_library(), which makes one module of the tree.

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
# Only what a public header marks TKV_API leaves the shared library.
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()

find_program(TIERKV_CCACHE ccache)
if(TIERKV_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${TIERKV_CCACHE})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${TIERKV_CCACHE})
endif()

set(TIERKV_HAVE_CUDA OFF)
if(NOT TIERKV_CUDA STREQUAL OFF)
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
      set(CMAKE_CUDA_ARCHITECTURES 80-real 89-real 90a-real 80-virtual)  # as ./dev gpu-package
    endif()
    enable_language(CUDA)
    if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake before 3.25.2 does not know nvcc's
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
    endif()
    set(CMAKE_CUDA_STANDARD 20)
    set(CMAKE_CUDA_STANDARD_REQUIRED ON)
    set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
    find_package(CUDAToolkit REQUIRED)
    set(TIERKV_HAVE_CUDA ON)
  elseif(TIERKV_CUDA STREQUAL ON)
    message(FATAL_ERROR "TIERKV_CUDA=ON but no CUDA compiler was found")
  endif()
endif()
message(STATUS "tierkv ${PROJECT_VERSION}: CUDA ${TIERKV_HAVE_CUDA}, build type ${CMAKE_BUILD_TYPE}")

# tierkv_settings: include path, warnings and sanitizers; linked privately by every target of ours.
add_library(tierkv_settings INTERFACE)
target_include_directories(tierkv_settings INTERFACE
  $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>)
# -Wno-restrict: GCC 12 warns falsely on std::string concatenation (GCC bug 105651).
# -ffp-contract=off: host and device must make the same bytes, so a * b + c is fused only where fma() says so.
target_compile_options(tierkv_settings INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wpedantic;-Wshadow;-ffp-contract=off>
  $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-restrict>
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<BOOL:${TIERKV_WERROR}>>:-Werror>
  $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra,-Wno-restrict,-ffp-contract=off;--expt-relaxed-constexpr>
  $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<VERSION_GREATER_EQUAL:${CMAKE_CUDA_COMPILER_VERSION},13.0>>:--compress-mode=size>
  $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${TIERKV_WERROR}>>:-Werror=all-warnings>)
if(TIERKV_SANITIZE)
  target_compile_options(tierkv_settings INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${TIERKV_SANITIZE};-fno-sanitize-recover=all;-fno-omit-frame-pointer>)
  target_link_options(tierkv_settings INTERFACE -fsanitize=${TIERKV_SANITIZE})
endif()

# tierkv_instance(LIST FOLDER/NAME.cu.in SUFFIX): fills in the template and appends the file it makes in the build tree to LIST.
macro(tierkv_instance list template suffix)
  get_filename_component(instance ${template} NAME_WE)
  configure_file(${template} ${instance}_${suffix}.cu @ONLY)
  list(APPEND ${list} ${CMAKE_CURRENT_BINARY_DIR}/${instance}_${suffix}.cu)
endmacro()

# tierkv_library(NAME [LINK lib...] [EXCLUDE folder...] [INSTANCES file...]): the static library tierkv_NAME from the *.cc of
# this folder and of those below it without EXCLUDE, and, where CUDA is on and there are *.cu, tierkv_NAME_cuda from those and
# from INSTANCES beside it.
function(tierkv_library name)
  cmake_parse_arguments(ARG "" "" "LINK;LINK_PRIVATE;EXCLUDE;INSTANCES" ${ARGN})
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS *.cc *.h)
  file(GLOB_RECURSE cuda_sources CONFIGURE_DEPENDS *.cu *.cuh)
  foreach(folder IN LISTS ARG_EXCLUDE)
    list(FILTER sources EXCLUDE REGEX "^${CMAKE_CURRENT_SOURCE_DIR}/${folder}")
    list(FILTER cuda_sources EXCLUDE REGEX "^${CMAKE_CURRENT_SOURCE_DIR}/${folder}")
  endforeach()
  add_library(tierkv_${name} STATIC ${sources})
  target_link_libraries(tierkv_${name} PUBLIC tierkv_settings ${ARG_LINK} PRIVATE ${ARG_LINK_PRIVATE})
  if(TIERKV_HAVE_CUDA AND cuda_sources)
    add_library(tierkv_${name}_cuda STATIC ${cuda_sources} ${ARG_INSTANCES})
    set(cuda_links ${ARG_LINK})
    list(TRANSFORM cuda_links REPLACE "^(tierkv_[a-z]+)$" "\\1_cuda")
    foreach(lib IN LISTS cuda_links)
      if(TARGET ${lib})
        target_link_libraries(tierkv_${name}_cuda PUBLIC ${lib})
      endif()
    endforeach()
    target_link_libraries(tierkv_${name}_cuda PUBLIC tierkv_${name} CUDA::cudart_static)
  endif()
endfunction()
