# `cpack` puts the tools and the core into a Debian package and into an archive that can be unpacked anywhere.
set(CPACK_PACKAGE_NAME tessera)
set(CPACK_PACKAGE_VENDOR "The Tessera maintainers")
set(CPACK_PACKAGE_CONTACT "The Tessera maintainers <maintainers@tessera.invalid>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY ${PROJECT_DESCRIPTION})
set(CPACK_RESOURCE_FILE_LICENSE ${PROJECT_SOURCE_DIR}/LICENSE)
set(CPACK_GENERATOR DEB TGZ)
set(CPACK_STRIP_FILES ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION utils)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)  # of the tools
# The core is a static library: what find_package(tessera) looks for.
set(CPACK_DEBIAN_PACKAGE_SUGGESTS
    "cmake, pkg-config, libhdf5-dev, libzstd-dev, libxxhash-dev, libdeflate-dev, nettle-dev, zlib1g-dev, libhwy-dev")
include(CPack)

install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/tessera RENAME copyright)
foreach(tool ckpt-inspect ckpt-reshard)
  set(share ${CMAKE_BINARY_DIR}/share)
  add_custom_command(OUTPUT ${share}/${tool}.1 ${share}/${tool} ${share}/_${tool} ${share}/${tool}.fish
                     COMMAND ${CMAKE_COMMAND} -E make_directory ${share}
                     COMMAND ${tool} --man > ${share}/${tool}.1
                     COMMAND ${tool} --completion bash > ${share}/${tool}
                     COMMAND ${tool} --completion zsh > ${share}/_${tool}
                     COMMAND ${tool} --completion fish > ${share}/${tool}.fish
                     DEPENDS ${tool} VERBATIM)
  list(APPEND manuals ${share}/${tool}.1)
  list(APPEND bash_completions ${share}/${tool})
  list(APPEND zsh_completions ${share}/_${tool})
  list(APPEND fish_completions ${share}/${tool}.fish)
endforeach()
add_custom_target(tessera_manuals ALL
                  DEPENDS ${manuals} ${bash_completions} ${zsh_completions} ${fish_completions})
install(FILES ${manuals} DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
install(FILES ${bash_completions} DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions)
install(FILES ${zsh_completions} DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/site-functions)
install(FILES ${fish_completions} DESTINATION ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d)
