# `cmake --install` gives a package that `find_package(tessera)` finds.
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/tessera)
install(TARGETS tessera_core tessera_embedding_kernels EXPORT tessera_targets
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(EXPORT tessera_targets NAMESPACE tessera:: FILE tessera-targets.cmake DESTINATION ${package_dir})
if(TESSERA_RUNTIME)
  set(runtime_targets tessera_runtime)
  if(TARGET tessera_nccl)
    list(APPEND runtime_targets tessera_nccl)
  endif()
  install(TARGETS ${runtime_targets} EXPORT tessera_runtime_targets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
  install(EXPORT tessera_runtime_targets NAMESPACE tessera:: FILE tessera-runtime-targets.cmake
          DESTINATION ${package_dir})
  install(FILES src/cmake/Torch.cmake src/cmake/Trainer.cmake DESTINATION ${package_dir})
  install(DIRECTORY include/tessera DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
else()
  install(DIRECTORY include/tessera DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
          PATTERN runtime EXCLUDE PATTERN tessera.h EXCLUDE)
endif()
configure_package_config_file(src/cmake/tessera-config.cmake.in ${CMAKE_BINARY_DIR}/tessera-config.cmake
                              INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${CMAKE_BINARY_DIR}/tessera-config-version.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/tessera-config.cmake ${CMAKE_BINARY_DIR}/tessera-config-version.cmake
              src/cmake/Dependencies.cmake
        DESTINATION ${package_dir})
