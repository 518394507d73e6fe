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
set(CPACK_DEBIAN_PACKAGE_RECOMMENDS libcurl4)  # loaded for URLs
# The core is a static library: what find_package(tessera) looks for.
set(CPACK_DEBIAN_PACKAGE_SUGGESTS
    "cmake, pkg-config, libhdf5-dev, libzstd-dev, libxxhash-dev, libdeflate-dev, nettle-dev, zlib1g-dev, libhwy-dev")
include(CPack)

install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/tessera RENAME copyright)
include(Manuals)
install_manuals(${CMAKE_INSTALL_MANDIR} ${CMAKE_INSTALL_DATADIR})
