# Finds libtorch in a Python environment, as the target tessera_deps::torch (CPU) and, where the wheel
# was built with CUDA, tessera_deps::torch_cuda. CMake files of torch itself are passed over: they ask for
# a CUDA compiler and for the toolkit's libraries, and the runtime needs neither (docs/decisions/0005).
set(TESSERA_TORCH_DIR "${TESSERA_TORCH_DIR}" CACHE PATH "The folder of the installed torch package (include/, lib/)")
set(torch_dir ${TESSERA_TORCH_DIR})
if(NOT torch_dir AND TESSERA_PYTHON)
  cmake_path(GET TESSERA_PYTHON PARENT_PATH bin)
  file(GLOB torch_dir LIST_DIRECTORIES true ${bin}/../lib/python3*/site-packages/torch)
endif()
if(NOT EXISTS "${torch_dir}/lib/libtorch_cpu.so")
  message(FATAL_ERROR "TESSERA_RUNTIME: expected libtorch below TESSERA_TORCH_DIR or in the environment of "
                      "TESSERA_PYTHON, found '${torch_dir}'")
endif()
cmake_path(NORMAL_PATH torch_dir)
file(GLOB cuda_libs LIST_DIRECTORIES true ${torch_dir}/../nvidia/*/lib)
list(JOIN cuda_libs ":" cuda_lib_path)

find_path(TESSERA_GLOO_INCLUDE_DIR gloo/config.h REQUIRED)  # the wheel has the symbols, not the headers

add_library(tessera_deps::torch INTERFACE IMPORTED)
target_include_directories(tessera_deps::torch SYSTEM INTERFACE
  ${torch_dir}/include ${torch_dir}/include/torch/csrc/api/include ${TESSERA_GLOO_INCLUDE_DIR})
target_compile_definitions(tessera_deps::torch INTERFACE USE_C10D_GLOO USE_DISTRIBUTED)
target_link_libraries(tessera_deps::torch INTERFACE ${torch_dir}/lib/libtorch_cpu.so ${torch_dir}/lib/libc10.so)
target_link_options(tessera_deps::torch INTERFACE
  -Wl,-rpath,${torch_dir}/lib "$<$<BOOL:${cuda_lib_path}>:-Wl,-rpath-link,${cuda_lib_path}>")

if(EXISTS ${torch_dir}/lib/libtorch_cuda.so AND EXISTS ${torch_dir}/../nvidia/nccl/include/nccl.h)
  add_library(tessera_deps::torch_cuda INTERFACE IMPORTED)
  file(GLOB cuda_includes LIST_DIRECTORIES true ${torch_dir}/../nvidia/*/include)
  target_include_directories(tessera_deps::torch_cuda SYSTEM INTERFACE ${cuda_includes})
  target_link_libraries(tessera_deps::torch_cuda INTERFACE tessera_deps::torch
    -Wl,--no-as-needed ${torch_dir}/lib/libtorch_cuda.so ${torch_dir}/lib/libc10_cuda.so -Wl,--as-needed)
endif()
