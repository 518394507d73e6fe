# `cmake --install` gives a package that `find_package(tessera)` finds.
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/tessera)
install(TARGETS tessera_core EXPORT tessera_targets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(EXPORT tessera_targets NAMESPACE tessera:: FILE tessera-targets.cmake DESTINATION ${package_dir})
install(DIRECTORY include/tessera DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
configure_package_config_file(src/cmake/tessera-config.cmake.in ${CMAKE_BINARY_DIR}/tessera-config.cmake
                              INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${CMAKE_BINARY_DIR}/tessera-config-version.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/tessera-config.cmake ${CMAKE_BINARY_DIR}/tessera-config-version.cmake
              src/cmake/Dependencies.cmake
        DESTINATION ${package_dir})
