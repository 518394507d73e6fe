#pragma once

#include <c10/core/Event.h>

#include <memory>
#include <optional>
#include <vector>

#include "runtime/embedding/device_packing.h"
#include "runtime/embedding/input.h"
#include "runtime/embedding/outgoing_batch.h"
#include "runtime/embedding/side_stream.h"

namespace tessera::embedding {

/// A batch in transit to ranks whose tables are on an accelerator. Works on a side stream, so that
/// the batch travels while the device computes an earlier batch. The host waits in `advance` only,
/// for the sizes. The batch is in host memory, or on the tables' device.
class DeviceInput final : public Input {
 public:
  /// Whether `bags()` also returns the ids in host memory. The host then waits for their copy.
  enum class HostIds { none, copied };

  /// Starts the first message (sizes, see Input), as HostInput does. Requires: all ranks have the
  /// same tables and plan. `group`: used by inputs only, because a batch's messages must not wait
  /// behind a lookup's messages.
  DeviceInput(const TableSet& tables, std::shared_ptr<const Assignments> assignments,
              std::shared_ptr<dist::Group> group, const OwnBatch& batch, std::uint64_t fingerprint,
              std::shared_ptr<SideStream> stream, HostIds host_ids = HostIds::none);

  void advance() override;
  const LocalBags& bags() override;
  void return_weight_gradients(const at::Tensor& from, at::Tensor to) override;
  const at::Tensor& lengths() override;

 private:
  void take_batch(const TableSet& tables, const KeyedJaggedTensor& batch);
  void pack_on_host();
  void start_headers(std::uint64_t fingerprint);
  at::Tensor received_headers();
  void take_headers(const std::int64_t* headers);
  void refuse_bad_ids(const std::int64_t* own_header);
  void send();
  void unpack(const std::vector<std::int64_t>& sizes);
  /// Calls `visit(output, peer, begin, num_ids)` for each output of this rank and each rank
  /// (`peer`); outputs are the outer loop. `begin`: the position of the output's first id among the
  /// ids that the peer sent.
  template <class Visit>
  void for_received(const Visit& visit) const;

  std::shared_ptr<SideStream> stream_;
  at::Device device_;
  /// A batch on the device and its tables, to name an id that is out of range.
  struct OwnBatchOnDevice {
    TableSet tables;
    KeyedJaggedTensor batch;
  };
  std::optional<OwnBatchOnDevice> own_batch_;
  std::vector<Outgoing> outgoing_;
  HostIds host_ids_;
  std::optional<DevicePacking> packing_;  // of a batch on the device
  // A pair is a rank and one of its outputs. The header ends with one number for each pair, in the
  // order of `outgoing_`: how many ids of the batch go to that output.
  std::int64_t num_pairs_ = 0;
  std::int64_t own_pairs_begin_ = 0;  // index of the first pair of this rank
  at::Tensor headers_;                // on the device, or on the host if there is one rank
  std::vector<std::vector<std::int64_t>> num_ids_of_output_;  // by rank that sends, by output here
  at::Tensor sent_, received_;
  at::Tensor positions_;  // of all ids that are sent, if weight gradients are wanted
  at::Tensor lengths_;    // of the whole batch, on the device
  dist::Pending pending_;
  std::optional<c10::Event> arrived_;
  bool has_advanced_ = false;
};

}  // namespace tessera::embedding
