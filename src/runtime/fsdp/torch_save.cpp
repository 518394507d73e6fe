#include "runtime/fsdp/torch_save.h"

#include <torch/csrc/jit/serialization/pickler.h>

#include "runtime/fsdp/flat_param_handle.h"
#include "runtime/fsdp/traversal.h"
#include "tessera/base/error.h"

namespace tessera::fsdp {
namespace {

/// The type that torch's pickler uses for metadata of a tensor.
using Metadata = std::unordered_map<std::string, bool>;

void refuse_shard(const at::Tensor& tensor, Metadata& /*metadata*/) {
  const auto handle = FlatParamHandle::of(tensor);
  if (!handle || !handle->is_sharded() || handle->is_whole()) return;
  const FlatUnit& unit = handle->unit();
  throw Error::expected(ErrorKind::invalid_argument,
                        {.fqn = join_fqn(unit.name, unit.parameters[handle->index_of(tensor)].fqn)},
                        "torch::save", "a whole tensor", "a parameter of a fully sharded module",
                        "tessera::save(state, path) writes a checkpoint from all ranks; "
                        "tessera::state_dict returns whole tensors");
}

}  // namespace

bool refuse_in_torch_save() {
  for (const c10::DeviceType device : {c10::DeviceType::CPU, c10::DeviceType::CUDA}) {
    auto& of_device = torch::jit::GetBackendMetaSerialization()[static_cast<std::size_t>(device)];
    if (of_device) continue;
    of_device = {refuse_shard, [](const at::Tensor&, Metadata&) {}};
  }
  return true;
}

}  // namespace tessera::fsdp
