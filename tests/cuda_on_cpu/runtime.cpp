// Implements the functions of CUDA's runtime that Tessera's kernels and their tests call.
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "cuda_on_cpu/cuda_on_cpu.h"
#include "cuda_on_cpu/last_error.h"

namespace cuda_on_cpu {
namespace {

using Queue = std::deque<std::function<void()>>;

std::map<cudaStream_t, Queue>& queues() {
  static std::map<cudaStream_t, Queue> queues;
  return queues;
}

void run_all(Queue& queue) {
  while (!queue.empty()) {
    const std::function<void()> next = std::move(queue.front());
    queue.pop_front();
    next();
  }
}

cudaError_t last_error = cudaSuccess;

}  // namespace

void enqueue(cudaStream_t stream, std::function<void()> work) {
  queues()[stream].push_back(std::move(work));
}

void set_last_error(cudaError_t error) {
  last_error = error;
}

}  // namespace cuda_on_cpu

using cuda_on_cpu::enqueue;

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  return std::exchange(cuda_on_cpu::last_error, cudaSuccess);
}

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorInvalidConfiguration ? "invalid configuration argument" : "other error";
}

/// Fills the memory with bytes 0xFF: a float that is read before it is written is NaN.
cudaError_t cudaMallocAsync(void** memory, std::size_t nbytes, cudaStream_t) {
  *memory = std::malloc(nbytes);
  if (*memory == nullptr) return cudaErrorMemoryAllocation;
  std::memset(*memory, 0xFF, nbytes);
  return cudaSuccess;
}

cudaError_t cudaFreeAsync(void* memory, cudaStream_t stream) {
  enqueue(stream, [=] { std::free(memory); });
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t nbytes, cudaStream_t stream) {
  enqueue(stream, [=] { std::memset(memory, value, nbytes); });
  return cudaSuccess;
}

/// Reads a host source before it returns, as CUDA does with pageable memory. The rest is queued.
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t nbytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  if (nbytes == 0) return cudaSuccess;
  if (kind == cudaMemcpyHostToDevice) {
    const auto* begin = static_cast<const char*>(from);
    enqueue(stream, [to, bytes = std::vector<char>(begin, begin + nbytes)] {
      std::memcpy(to, bytes.data(), bytes.size());
    });
  } else {
    enqueue(stream, [=] { std::memcpy(to, from, nbytes); });
  }
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = reinterpret_cast<cudaStream_t>(std::make_unique<char>().release());
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  cuda_on_cpu::run_all(cuda_on_cpu::queues()[stream]);
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  cudaStreamSynchronize(stream);
  cuda_on_cpu::queues().erase(stream);
  std::unique_ptr<char>(reinterpret_cast<char*>(stream)).reset();
  return cudaSuccess;
}
