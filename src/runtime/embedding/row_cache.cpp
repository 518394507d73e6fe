#include "runtime/embedding/row_cache.h"

#include <c10/core/StreamGuard.h>
#include <torch/types.h>

#include <algorithm>
#include <utility>

#include "runtime/torch_bridge.h"
#include "tessera/base/error.h"

namespace tessera::embedding {
namespace {

using at::Tensor;

constexpr std::int64_t kNone = -1;

/// Copies numbers into pinned memory.
Tensor pinned_copy(std::span<const std::int64_t> numbers) {
  Tensor copy = pinned({static_cast<std::int64_t>(numbers.size())}, at::kLong);
  std::ranges::copy(numbers, copy.mutable_data_ptr<std::int64_t>());
  return copy;
}

std::vector<std::int64_t> shape_with_rows(const Tensor& tensor, std::int64_t num_rows) {
  std::vector<std::int64_t> shape = tensor.sizes().vec();
  shape[0] = num_rows;
  return shape;
}

}  // namespace

RowCache::RowCache(std::string table, Tensor weight, const FusedState& state,
                   std::int64_t num_slots, std::shared_ptr<SideStream> stream)
    : table_(std::move(table)), stream_(std::move(stream)) {
  on_host_.push_back(weight.detach());
  for (const FusedState::Slot& slot : state.slots) on_host_.push_back(slot.tensor);
  const c10::StreamGuard guard(stream_->stream());
  for (const Tensor& each : on_host_) {
    on_device_.push_back(
        torch::zeros(shape_with_rows(each, num_slots),
                     at::TensorOptions(stream_->device()).dtype(each.scalar_type())));
  }
  device_state_ = state;
  for (std::size_t i = 0; i < state.slots.size(); ++i) {
    device_state_.slots[i].tensor = on_device_[i + 1];
  }
  slot_of_row_.assign(static_cast<std::size_t>(weight.size(0)), kNone);
  seen_in_.assign(static_cast<std::size_t>(weight.size(0)), 0);
  row_of_slot_.assign(static_cast<std::size_t>(num_slots), kNone);
  last_batch_.assign(static_cast<std::size_t>(num_slots), 0);
  is_changed_.assign(static_cast<std::size_t>(num_slots), false);
}

/// Returns the rows in `ids`, each once, in the order of their first occurrence.
std::vector<std::int64_t> RowCache::distinct_rows(std::span<const std::int64_t> ids) {
  ++num_calls_;
  std::vector<std::int64_t> rows;
  for (const std::int64_t id : ids) {
    std::uint64_t& seen = seen_in_[static_cast<std::size_t>(id)];
    if (std::exchange(seen, num_calls_) != num_calls_) rows.push_back(id);
  }
  return rows;
}

void RowCache::check_room(std::span<const std::int64_t> ids) {
  const auto num_rows = static_cast<std::int64_t>(distinct_rows(ids).size());
  if (num_rows <= num_slots()) return;
  throw Error::expected(ErrorKind::unsupported, {.fqn = table_}, "rows of a batch in one table",
                        "at most " + std::to_string(num_slots()) + ", the rows that " +
                            stream_->device().str() + " holds (ShardOptions::cached_rows)",
                        std::to_string(num_rows), "no table has been changed");
}

/// Returns slots for new rows: free slots first, then those whose rows were looked up longest ago.
/// Never takes a slot of a row of the current batch.
std::vector<std::int64_t> RowCache::take_slots(std::int64_t num_wanted) {
  std::vector<std::int64_t> slots;
  for (std::int64_t slot = 0; slot < num_slots(); ++slot) {
    if (last_batch_[static_cast<std::size_t>(slot)] != num_batches_) slots.push_back(slot);
  }
  TESSERA_CHECK(num_wanted <= static_cast<std::int64_t>(slots.size()));
  const auto age = [&](std::int64_t slot) {
    const auto at = static_cast<std::size_t>(slot);
    return std::pair(row_of_slot_[at] == kNone ? 0 : last_batch_[at], slot);
  };
  std::ranges::partial_sort(slots, slots.begin() + num_wanted, {}, age);
  slots.resize(static_cast<std::size_t>(num_wanted));
  return slots;
}

/// Starts to copy changed rows in these slots to pinned memory. Requires: no write-back is pending.
void RowCache::start_write_back(std::span<const std::int64_t> slots) {
  std::vector<std::int64_t> changed, rows;
  for (const std::int64_t slot : slots) {
    if (!is_changed_[static_cast<std::size_t>(slot)]) continue;
    changed.push_back(slot);
    rows.push_back(row_of_slot_[static_cast<std::size_t>(slot)]);
  }
  if (changed.empty()) return;
  const Tensor places = stream_->to_device(pinned_copy(changed));
  std::vector<Tensor> values;
  for (const Tensor& each : on_device_) {
    const Tensor gathered = each.index_select(0, places);
    values.push_back(pinned(gathered.sizes(), gathered.scalar_type()));
    values.back().copy_(gathered, /*non_blocking=*/true);
  }
  write_back_.emplace(WriteBack{pinned_copy(rows), std::move(values), stream_->record()});
}

/// Writes the rows of an earlier `start_write_back` to the table. Waits for their copies.
void RowCache::finish_write_back() {
  if (!write_back_) return;
  write_back_->end.synchronize();
  for (std::size_t i = 0; i < on_host_.size(); ++i) {
    on_host_[i].index_copy_(0, write_back_->rows, write_back_->values[i]);
  }
  write_back_.reset();
}

void RowCache::fetch(std::span<const std::int64_t> ids, std::span<std::int64_t> slots) {
  const at::NoGradGuard no_grad;
  ++num_batches_;
  std::vector<std::int64_t> missing;
  for (const std::int64_t row : distinct_rows(ids)) {
    const std::int32_t slot = slot_of_row_[static_cast<std::size_t>(row)];
    if (slot == kNone) {
      missing.push_back(row);
    } else {
      last_batch_[static_cast<std::size_t>(slot)] = num_batches_;
    }
  }
  if (!missing.empty()) {
    finish_write_back();  // a row that is needed now may be in a write-back
    const std::vector<std::int64_t> taken = take_slots(static_cast<std::int64_t>(missing.size()));
    const c10::Stream computing = stream_->current();
    const c10::StreamGuard guard(stream_->stream());
    const Tensor rows = pinned_copy(missing);
    std::vector<Tensor> fetched;  // the missing rows, copied while the device still computes
    for (const Tensor& each : on_host_) {
      Tensor staged = pinned(shape_with_rows(each, rows.numel()), each.scalar_type());
      at::index_select_out(staged, each, 0, rows);
      fetched.push_back(stream_->to_device(staged));
    }
    c10::Event computed(computing.device_type());
    computed.record(computing);
    computed.block(stream_->stream());
    start_write_back(taken);
    const Tensor places = stream_->to_device(pinned_copy(taken));
    for (std::size_t i = 0; i < on_device_.size(); ++i) {
      on_device_[i].index_copy_(0, places, fetched[i]);
    }
    stream_->record().block(computing);
    for (std::size_t i = 0; i < taken.size(); ++i) {
      const auto slot = static_cast<std::size_t>(taken[i]);
      if (row_of_slot_[slot] != kNone) {
        slot_of_row_[static_cast<std::size_t>(row_of_slot_[slot])] = kNone;
        ++generation_;
      }
      row_of_slot_[slot] = missing[i];
      slot_of_row_[static_cast<std::size_t>(missing[i])] = static_cast<std::int32_t>(slot);
      last_batch_[slot] = num_batches_;
      is_changed_[slot] = false;
    }
  }
  std::ranges::transform(ids, slots.begin(), [&](std::int64_t id) {
    return slot_of_row_[static_cast<std::size_t>(id)];
  });
}

void RowCache::mark_changed(std::span<const std::int64_t> slots) {
  for (const std::int64_t slot : slots) is_changed_[static_cast<std::size_t>(slot)] = true;
}

void RowCache::write_back() {
  const at::NoGradGuard no_grad;
  finish_write_back();
  stream_->wait_for_current();
  {
    const c10::StreamGuard guard(stream_->stream());
    std::vector<std::int64_t> all;
    for (std::int64_t slot = 0; slot < num_slots(); ++slot) {
      if (row_of_slot_[static_cast<std::size_t>(slot)] != kNone) all.push_back(slot);
    }
    start_write_back(all);
  }
  finish_write_back();
  std::ranges::fill(slot_of_row_, static_cast<std::int32_t>(kNone));
  std::ranges::fill(row_of_slot_, kNone);
  is_changed_.assign(is_changed_.size(), false);
  ++generation_;
}

TableTensors RowCache::tensors(std::int64_t step) {
  device_state_.step = step;
  for (const Tensor& each : on_device_) stream_->note_use(each);
  return {on_device_.front(), &device_state_};
}

}  // namespace tessera::embedding
