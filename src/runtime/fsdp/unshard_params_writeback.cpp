#include "runtime/fsdp/unshard_params_writeback.h"

#include <torch/types.h>

#include <utility>

namespace tessera::fsdp {
namespace {

using at::Tensor;

/// If the user assigned tensors to parameters or gradients in place of the views of `whole.flat`,
/// copies these tensors into `whole.flat`. Returns the index of a tensor whose shape does not fit,
/// if there is one.
std::optional<std::size_t> take_assigned(const FlatParamContents& contents,
                                         const WholeTensors& whole) {
  std::optional<std::size_t> unfit;
  std::vector<std::pair<Tensor, Tensor>> assigned;  // slot in `whole.flat`, new elements
  for (std::size_t i = 0; i < whole.shown.size(); ++i) {
    const Tensor& shown = whole.shown[i];
    if (!shown.defined()) continue;
    const Tensor slot = contents.full_view(whole.flat, i);
    if (shown.is_set_to(slot)) continue;
    if (slot.sizes() != shown.sizes()) {
      unfit = i;
      continue;
    }
    // A copy if the new tensor is another view of `whole.flat`: two parameters may have been
    // swapped, or one transposed.
    const bool is_in_flat = shown.storage().is_alias_of(whole.flat.storage());
    assigned.emplace_back(slot, is_in_flat ? shown.clone() : shown);
  }
  for (const auto& [slot, elements] : assigned) slot.copy_(elements);
  return unfit;
}

/// Collective. Overwrites `shard` with its part of rank 0's `flat`, in place unless offloaded.
void take_from_first(const FlatParamContents& contents, at::Device compute_device,
                     const Tensor& flat, const Tensor& shard) {
  const Tensor received = shard.to(compute_device);
  if (contents.replicate_group().rank() == 0) {
    const Tensor whole = flat.defined() ? flat.to(compute_device) : flat;
    contents.shard_group().scatter(received, whole, 0, contents.display_name());
  }
  contents.replicate_group().broadcast(received, 0, contents.display_name()).wait();
  if (!received.is_same(shard)) shard.copy_(received);
}

}  // namespace

std::optional<std::size_t> write_back(const FlatParamContents& contents,
                                      const UnshardParamsOptions& options,
                                      at::Device compute_device, const WholeTensors& whole,
                                      const Tensor& shard) {
  std::optional<std::size_t> unfit;
  if (whole.flat.defined()) unfit = take_assigned(contents, whole);
  if (options.rank0_only) {
    take_from_first(contents, compute_device, whole.flat, shard);
  } else {
    shard.copy_(
        contents.is_sharded()
            ? whole.flat.narrow(0, contents.shard_group().rank() * shard.numel(), shard.numel())
            : whole.flat);
  }
  return unfit;
}

}  // namespace tessera::fsdp
