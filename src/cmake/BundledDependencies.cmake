# Builds the libraries that the core is built on from TESSERA_BUNDLED_SOURCES, a folder with their sources, as static
# libraries: for the Python wheel and its sdist, which rely on nothing that is installed. Dependencies.cmake finds
# them where this is not set.
include(ExternalProject)
find_package(Threads REQUIRED)

set(bundled_warnings -w)  # theirs, not ours to mend

function(bundled_library name)  # bundled_library(name INCLUDES folders... SOURCES files...)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "INCLUDES;SOURCES")
  add_library(bundled_${name} STATIC ${arg_SOURCES})
  target_include_directories(bundled_${name} SYSTEM PUBLIC ${arg_INCLUDES})
  target_compile_options(bundled_${name} PRIVATE ${bundled_warnings} -O3)
  add_library(tessera_deps::${name} ALIAS bundled_${name})
endfunction()

set(zlib ${TESSERA_BUNDLED_SOURCES}/zlib)
file(GLOB zlib_sources ${zlib}/*.c)
bundled_library(zlib INCLUDES ${zlib} SOURCES ${zlib_sources})
target_compile_definitions(bundled_zlib PRIVATE _LARGEFILE64_SOURCE=1 HAVE_UNISTD_H)
add_library(ZLIB::ZLIB ALIAS bundled_zlib)

set(zstd ${TESSERA_BUNDLED_SOURCES}/zstd/lib)
file(GLOB zstd_sources ${zstd}/common/*.c ${zstd}/compress/*.c ${zstd}/decompress/*.c)
bundled_library(zstd INCLUDES ${zstd} SOURCES ${zstd_sources})
target_compile_definitions(bundled_zstd PRIVATE ZSTD_DISABLE_ASM ZSTD_LEGACY_SUPPORT=0)

bundled_library(xxhash INCLUDES ${TESSERA_BUNDLED_SOURCES}/xxhash SOURCES ${TESSERA_BUNDLED_SOURCES}/xxhash/xxhash.c)

set(libdeflate ${TESSERA_BUNDLED_SOURCES}/libdeflate)
file(GLOB libdeflate_sources ${libdeflate}/lib/*.c ${libdeflate}/lib/arm/*.c ${libdeflate}/lib/x86/*.c)
bundled_library(libdeflate INCLUDES ${libdeflate} SOURCES ${libdeflate_sources})

# Three parts of nettle's. Its own build makes faster code for SHA-256, with m4, make and an assembler.
set(nettle ${TESSERA_BUNDLED_SOURCES}/nettle)
set(nettle_headers ${CMAKE_CURRENT_BINARY_DIR}/bundled/nettle)
file(GLOB nettle_public ${nettle}/*.h)
file(COPY ${nettle_public} DESTINATION ${nettle_headers}/nettle)
bundled_library(nettle INCLUDES ${nettle_headers}
                SOURCES ${nettle}/base64-decode.c ${nettle}/base64-encode.c ${nettle}/md5.c
                        ${nettle}/md5-compress.c ${nettle}/sha256.c ${nettle}/sha256-compress.c
                        ${nettle}/write-be32.c ${nettle}/write-le32.c)

# HDF5's own build detects much about the machine. Of its tests of the compiler, none should stop at a warning.
set(hdf5_build ${CMAKE_CURRENT_BINARY_DIR}/bundled/hdf5)
set(hdf5_library ${hdf5_build}/bin/libhdf5.a)
ExternalProject_Add(bundled_hdf5_build
  SOURCE_DIR ${TESSERA_BUNDLED_SOURCES}/hdf5
  BINARY_DIR ${hdf5_build}
  CMAKE_ARGS -DCMAKE_BUILD_TYPE=Release -DCMAKE_POSITION_INDEPENDENT_CODE=ON
             -DCMAKE_C_COMPILER=${CMAKE_C_COMPILER} -DCMAKE_C_COMPILER_LAUNCHER=${CMAKE_C_COMPILER_LAUNCHER}
             "-DCMAKE_C_FLAGS=-w -Wno-implicit-int"
             -DBUILD_SHARED_LIBS=OFF -DBUILD_TESTING=OFF -DHDF5_BUILD_TOOLS=OFF -DHDF5_BUILD_UTILS=OFF
             -DHDF5_BUILD_EXAMPLES=OFF -DHDF5_BUILD_HL_LIB=OFF -DHDF5_ENABLE_SZIP_SUPPORT=OFF -DHDF5_NO_PACKAGES=ON
             -DHDF5_ENABLE_Z_LIB_SUPPORT=ON -DZLIB_USE_EXTERNAL=OFF
             -DZLIB_INCLUDE_DIR=${zlib} -DZLIB_LIBRARY=$<TARGET_FILE:bundled_zlib>
  BUILD_COMMAND ${CMAKE_COMMAND} --build <BINARY_DIR> --target hdf5-static
  INSTALL_COMMAND ""
  BUILD_BYPRODUCTS ${hdf5_library}
  DEPENDS bundled_zlib)
file(MAKE_DIRECTORY ${hdf5_build}/src)  # CMake wants it to exist
add_library(bundled_hdf5 STATIC IMPORTED GLOBAL)
add_dependencies(bundled_hdf5 bundled_hdf5_build)
set_target_properties(bundled_hdf5 PROPERTIES
  IMPORTED_LOCATION ${hdf5_library}
  INTERFACE_INCLUDE_DIRECTORIES "${TESSERA_BUNDLED_SOURCES}/hdf5/src;${hdf5_build}/src"
  INTERFACE_LINK_LIBRARIES "bundled_zlib;${CMAKE_DL_LIBS};m")
add_library(tessera_deps::hdf5 ALIAS bundled_hdf5)

add_library(tessera_deps::hwy INTERFACE IMPORTED)  # the tables' kernels alone need it, and the wheel has none
add_library(bundled_json INTERFACE)
target_include_directories(bundled_json SYSTEM INTERFACE ${TESSERA_BUNDLED_SOURCES}/json/include)
add_library(tessera_deps::json ALIAS bundled_json)
set(CLI11_INCLUDE_DIR ${TESSERA_BUNDLED_SOURCES}/cli11/include)
