#include "runtime/embedding/outgoing_batch.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "runtime/embedding/host_loops.h"

namespace tessera::embedding {
namespace {

/// Calls `visit(sample, position, row)` for each id of a slice that is in `rows`. `row` is relative
/// to the first of `rows`.
template <class Visit>
void for_each_id(const TableBatch& batch, const TableBatch::Slice& slice, FlatRange rows,
                 const Visit& visit) {
  const std::int64_t* const ids = longs(batch.ids);
  std::int64_t position = slice.begin;
  for (std::int64_t sample = 0; sample < batch.batch_size; ++sample) {
    const std::int64_t end = position + batch.length(slice, sample);
    for (; position < end; ++position) {
      const std::int64_t id = ids[position];
      if (id >= rows.begin && id < rows.end) visit(sample, position, id - rows.begin);
    }
  }
}

std::int64_t num_ids_in(const TableBatch& batch, const TableBatch::Slice& slice, FlatRange rows) {
  const std::int64_t* const ids = longs(batch.ids);
  std::int64_t num_ids = 0;
  for (std::int64_t i = slice.begin; i < slice.end; ++i) {
    num_ids += static_cast<std::int64_t>(ids[i] >= rows.begin && ids[i] < rows.end);
  }
  return num_ids;
}

/// Where one Outgoing is written: in the message, except `positions`, which are not sent.
struct Place {
  const Outgoing* outgoing;
  std::int64_t* lengths;
  std::int64_t* ids;
  float* weights;
  std::int64_t* positions;  // null: positions are not needed
};

void pack(const TableBatch& batch, Place place) {
  const Outgoing& outgoing = *place.outgoing;
  const TableBatch::Slice& slice = outgoing.slice;
  const float* const from =
      batch.weights.defined() ? batch.weights.const_data_ptr<float>() : nullptr;
  if (slice.is_missing) {
    std::fill_n(place.lengths, batch.batch_size, 0);
  } else if (outgoing.assignment->has_all_rows) {
    std::copy_n(longs(batch.lengths) + slice.first_bag, batch.batch_size, place.lengths);
    std::copy_n(longs(batch.ids) + slice.begin, outgoing.num_ids, place.ids);
    if (from != nullptr) std::copy_n(from + slice.begin, outgoing.num_ids, place.weights);
    if (place.positions != nullptr) {
      std::iota(place.positions, place.positions + outgoing.num_ids, slice.begin);
    }
  } else {
    std::fill_n(place.lengths, batch.batch_size, 0);
    for_each_id(batch, slice, outgoing.assignment->rows,
                [&](std::int64_t sample, std::int64_t position, std::int64_t row) {
                  ++place.lengths[sample];
                  *place.ids++ = row;
                  if (from != nullptr) *place.weights++ = from[position];
                  if (place.positions != nullptr) *place.positions++ = position;
                });
  }
}

}  // namespace

std::vector<Outgoing> outgoing_of(const TableBatch& batch, const Assignments& assignments) {
  std::vector<Outgoing> outgoing;
  for (std::size_t rank = 0; rank < assignments.size(); ++rank) {
    for (const Assignment& each : assignments[rank]) {
      for (const std::size_t output : each.outputs) {
        outgoing.push_back({&each, batch.slices[output], static_cast<int>(rank)});
      }
    }
  }
  return outgoing;
}

void sum_up(std::vector<Outgoing>& outgoing, std::vector<std::int64_t>& num_sent) {
  for (Outgoing& each : outgoing) {
    std::int64_t& of_rank = num_sent[static_cast<std::size_t>(each.rank)];
    each.begin = std::exchange(of_rank, of_rank + each.num_ids);
  }
}

void count_ids(const TableBatch& batch, std::vector<Outgoing>& outgoing) {
  for_all(outgoing, [&](Outgoing& each) {
    each.num_ids = each.assignment->has_all_rows
                       ? each.slice.end - each.slice.begin
                       : num_ids_in(batch, each.slice, each.assignment->rows);
  });
}

void pack(const TableBatch& batch, const std::vector<Outgoing>& outgoing,
          const std::vector<std::int64_t>& sizes, const std::vector<std::int64_t>& num_sent,
          at::Tensor& message, std::vector<std::vector<std::int64_t>>* positions) {
  std::vector<Place> places;
  auto* begin = message.mutable_data_ptr<std::int64_t>();
  auto next = outgoing.begin();
  for (std::size_t rank = 0; rank < sizes.size(); ++rank) {
    std::vector<std::int64_t>* const of_rank = positions ? &(*positions)[rank] : nullptr;
    if (of_rank != nullptr) of_rank->resize(static_cast<std::size_t>(num_sent[rank]));
    const auto is_of_rank = [&](const Outgoing& each) {
      return each.rank == static_cast<int>(rank);
    };
    const auto end = std::find_if_not(next, outgoing.end(), is_of_rank);
    std::int64_t* lengths = begin;
    std::int64_t* const ids = begin + (end - next) * batch.batch_size;
    auto* const weights = reinterpret_cast<float*>(ids + num_sent[rank]);
    for (; next != end; ++next, lengths += batch.batch_size) {
      places.push_back({&*next, lengths, ids + next->begin, weights + next->begin,
                        of_rank ? of_rank->data() + next->begin : nullptr});
    }
    begin += sizes[rank];
  }
  for_all(places, [&](const Place& place) { pack(batch, place); });
}

}  // namespace tessera::embedding
