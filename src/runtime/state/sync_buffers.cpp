#include "tessera/runtime/state/module_state_dict.h"

#include <torch/types.h>

#include <set>

#include "runtime/dist/sync_states.h"

namespace tessera {

void sync_buffers(torch::nn::Module& model, BufferSync how) {
  const dist::Mesh mesh = mesh_of(model);
  if (mesh.world_size() == 1) return;
  const at::NoGradGuard no_grad;
  dist::Group& world = *mesh.world();
  dist::StateSync sync(world);
  std::set<const c10::TensorImpl*> averaged;
  for (const auto& each : model.named_buffers()) {
    const at::Tensor& buffer = each.value();
    if (!buffer.defined()) continue;
    if (how == BufferSync::rank0 || !buffer.is_floating_point()) {
      sync.sync(each.key(), buffer);
      continue;
    }
    if (!averaged.insert(buffer.unsafeGetTensorImpl()).second) continue;
    // Contiguous, because the buffer may have other strides on another rank.
    const at::Tensor mean = (buffer.detach().to(at::kDouble) / mesh.world_size()).contiguous();
    world.all_reduce(mean, each.key()).wait();
    buffer.detach().copy_(mean);
  }
}

}  // namespace tessera
