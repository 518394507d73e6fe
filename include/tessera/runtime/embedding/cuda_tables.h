#pragma once

namespace tessera::embedding {

/// Makes collections that are sharded from now on use Tessera's CUDA kernels for tables on a CUDA
/// device, instead of ATen's operators. In the library `tessera::cuda_tables`, which links CUDA.
/// Thread-safe.
void use_cuda_kernels();

}  // namespace tessera::embedding
