#include "runtime/fsdp/spare_memory.h"

#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>

#include <utility>

namespace tessera::fsdp {

void SpareMemory::allocate(const at::Tensor& tensor) {
  c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
  const auto nbytes = static_cast<std::size_t>(tensor.numel() * tensor.element_size());
  const bool fits = spare_.get() != nullptr && nbytes <= nbytes_ && nbytes_ - nbytes <= nbytes_ / 8;
  if (!fits) release();
  const c10::DeviceGuard on(tensor.device());
  storage->set_data_ptr_noswap(fits ? std::move(spare_) : storage->allocator()->allocate(nbytes));
  storage->set_nbytes(nbytes);
  nbytes_ = 0;
}

void SpareMemory::free(const at::Tensor& tensor) {
  c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
  const std::size_t nbytes = storage->nbytes();
  c10::DataPtr freed = storage->set_data_ptr(storage->allocator()->allocate(0));
  storage->set_nbytes(std::size_t{0});
  if (!tensor.is_cpu()) return;
  spare_ = std::move(freed);
  nbytes_ = nbytes;
}

void SpareMemory::release() {
  spare_ = c10::DataPtr();
  nbytes_ = 0;
}

}  // namespace tessera::fsdp
