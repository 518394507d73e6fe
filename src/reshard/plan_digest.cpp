#include <span>

#include "base/digest.h"
#include "tessera/reshard/planner.h"

namespace tessera::reshard {

using formats::Alias;
using formats::CheckpointContents;
using formats::TensorEntry;

std::string plan_digest(const Plan& plan, const CheckpointContents& source) {
  Sha256 hash;
  const auto add = [&](std::string_view text) {
    hash.update(std::as_bytes(std::span(text)));
    hash.update(std::as_bytes(std::span("\n", 1)));
  };
  const auto add_number = [&](auto number) { add(std::to_string(number)); };
  add_number(plan.destination.world_size);
  bool has_casts = false;
  for (std::size_t i = 0; i < plan.destination.tensors.size(); ++i) {
    const TensorEntry& tensor = plan.destination.tensors[i];
    const TensorCopy& copy = plan.copies[i];
    has_casts |= tensor.meta.dtype != source.tensors[copy.source_tensor].meta.dtype;
    add(tensor.meta.fqn);
    add(dtype_name(tensor.meta.dtype));
    add(shape_to_string(tensor.meta.shape));
    add(formats::state_kind_name(tensor.kind));
    add(source.tensors[copy.source_tensor].meta.fqn);
    for (const std::int64_t width : copy.merged_widths) add_number(width);
    if (copy.num_repeated_rows != 0) add_number(copy.num_repeated_rows);
    for (std::size_t p = 0; p < tensor.pieces.size(); ++p) {
      add(region_to_string(tensor.pieces[p].region));
      add_number(tensor.pieces[p].rank);
      for (const std::uint32_t piece : copy.source_pieces[p]) add_number(piece);
    }
  }
  for (std::size_t i = 0; i < plan.destination.values.size(); ++i) {
    add(plan.destination.values[i].name);
    add(source.values[plan.value_sources[i]].name);
  }
  for (const Alias& alias : plan.destination.aliases) {
    add(alias.fqn);
    add(alias.target);
  }
  if (has_casts) add(on_overflow_name(plan.on_overflow));
  return hash.hex_digest();
}

}  // namespace tessera::reshard
