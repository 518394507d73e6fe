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

/// Sends a batch to ranks whose tables are on an accelerator. Works on a side stream, so that the
/// batch is sent while the device computes an earlier batch. The batch is in host memory, or on the
/// tables' device. The host waits for the sizes in `advance`, and for HostIds::copied in `bags`.
class DeviceInput final : public Input {
 public:
  /// Whether `bags()` also returns the ids in host memory. If so, `bags()` waits for their copy.
  enum class HostIds { none, copied };

  /// Starts the first message (sizes, see Input), as HostInput does. Requires: all ranks have the
  /// same tables and plan. `group`: used for batches only, so that a batch's messages do not wait
  /// for messages of a lookup.
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
  /// Calls `visit(output, peer, begin, num_ids)` for each output of this rank, and in it for each
  /// rank `peer`. `begin`: the index of the output's first id in the ids that the peer sent.
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
  std::optional<DevicePacking> packing_;  // only for a batch on the device
  // A pair is a rank and one of its outputs. The header ends with one number for each pair, in the
  // order of `outgoing_`: how many ids of this rank's batch go to that rank for that output.
  std::int64_t num_pairs_ = 0;
  std::int64_t own_pairs_begin_ = 0;  // index of the first pair of this rank
  at::Tensor headers_;                // on the device; with one rank and no packing_, on the host
  // [r][o]: how many ids rank r has sent for this rank's output o.
  std::vector<std::vector<std::int64_t>> num_ids_of_output_;
  at::Tensor sent_, received_;
  at::Tensor positions_;  // positions in the batch of all sent ids, if weight gradients are wanted
  at::Tensor lengths_;    // lengths of the whole batch, on the device
  dist::Pending pending_;
  std::optional<c10::Event> arrived_;
  bool has_advanced_ = false;
};

}  // namespace tessera::embedding
