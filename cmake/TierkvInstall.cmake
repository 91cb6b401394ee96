# SPDX-License-Identifier: Apache-2.0
# What `cmake --install` lays out: headers, libtierkv and libtierkv_dumps, shared and static, the CMake package, pkg-config
# files, the command and the licences. Both packages find their prefix from where they lie, so the tree may be moved.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/tierkv)
install(DIRECTORY include/tierkv TYPE INCLUDE FILES_MATCHING PATTERN "*.h")
install(FILES LICENSE NOTICE DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(DIRECTORY licenses DESTINATION ${CMAKE_INSTALL_DOCDIR})
# Three export sets, because a consumer of the shared libraries needs nothing else, and one of the static libtierkv no HDF5.
foreach(set IN ITEMS tierkv dumps)
  set(target tierkv_${set})
  if(set STREQUAL tierkv)
    set(target tierkv)
  endif()
  if(NOT TARGET ${target}_shared)
    continue()
  endif()
  install(TARGETS ${target}_shared EXPORT tierkv-${set} INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
  install(TARGETS ${target}_static EXPORT tierkv-${set}_static INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
  install(EXPORT tierkv-${set} NAMESPACE tierkv:: DESTINATION ${package_dir})
  install(EXPORT tierkv-${set}_static NAMESPACE tierkv:: DESTINATION ${package_dir})
endforeach()

configure_package_config_file(cmake/tierkvConfig.cmake.in ${PROJECT_BINARY_DIR}/tierkvConfig.cmake
  INSTALL_DESTINATION ${package_dir} NO_SET_AND_CHECK_MACRO)
# Before 1.0 a minor version may break the API.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/tierkvConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/tierkvConfig.cmake ${PROJECT_BINARY_DIR}/tierkvConfigVersion.cmake
  DESTINATION ${package_dir})

# ${pcfiledir}/../.. is the prefix: LIBDIR may have more than one level.
file(RELATIVE_PATH pc_prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
string(REGEX REPLACE "/$" "" pc_prefix "${pc_prefix}")
set(pc_cuda)
if(TIERKV_HAVE_CUDA)
  set(pc_cuda " -L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -lrt -ldl")
endif()
set(packages tierkv)
if(TIERKV_TOOLS)
  list(APPEND packages tierkv-dumps)
  install(TARGETS tierkv_tool)
endif()
foreach(package IN LISTS packages)
  configure_file(cmake/${package}.pc.in ${PROJECT_BINARY_DIR}/${package}.pc @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/${package}.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endforeach()
