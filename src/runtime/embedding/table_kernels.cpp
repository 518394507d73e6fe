#include "runtime/embedding/table_kernels.h"

#include <torch/types.h>

#include <map>
#include <mutex>

namespace tessera::embedding {
namespace {

struct Registered {
  std::mutex mutex;
  std::map<at::DeviceType, MakeTableKernels> by_type;
};

Registered& registered() {
  static Registered kernels;
  return kernels;
}

}  // namespace

void register_table_kernels(at::DeviceType type, MakeTableKernels make) {
  const std::lock_guard lock(registered().mutex);
  registered().by_type[type] = std::move(make);
}

std::unique_ptr<TableKernels> table_kernels_for(at::Device device) {
  {
    const std::lock_guard lock(registered().mutex);
    const auto found = registered().by_type.find(device.type());
    if (found != registered().by_type.end()) return found->second();
  }
  return device.is_cpu() ? cpu_table_kernels() : aten_table_kernels();
}

void add_rows(const at::Tensor& to, const at::Tensor& places, const at::Tensor& rows) {
  if (to.is_cuda()) {
    to.index_put_({places}, rows, /*accumulate=*/true);  // sorts the places
  } else {
    to.index_add_(0, places, rows);  // one after the other
  }
}

}  // namespace tessera::embedding
