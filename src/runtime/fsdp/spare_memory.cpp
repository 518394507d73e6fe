#include "runtime/fsdp/spare_memory.h"

#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <utility>

namespace tessera::fsdp {

void SpareMemory::allocate(const at::Tensor& tensor) {
  c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
  const auto nbytes = static_cast<std::size_t>(tensor.numel() * tensor.element_size());
  const auto fitting = std::ranges::find_if(blocks_, [nbytes](const Block& block) {
    return nbytes <= block.nbytes && block.nbytes - nbytes <= block.nbytes / 8;
  });
  if (fitting != blocks_.end()) {
    storage->set_data_ptr_noswap(std::move(fitting->data));
    blocks_.erase(fitting);
  } else {
    for (std::size_t released = 0; released < nbytes && !blocks_.empty(); blocks_.pop_back()) {
      released += blocks_.back().nbytes;
    }
    const c10::DeviceGuard on(tensor.device());
    storage->set_data_ptr_noswap(storage->allocator()->allocate(nbytes));
  }
  storage->set_nbytes(nbytes);
}

void SpareMemory::free(const at::Tensor& tensor) {
  c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
  const std::size_t nbytes = storage->nbytes();
  c10::DataPtr freed = storage->set_data_ptr(storage->allocator()->allocate(0));
  storage->set_nbytes(std::size_t{0});
  if (tensor.is_cpu() && nbytes > 0) blocks_.push_back({std::move(freed), nbytes});
}

}  // namespace tessera::fsdp
