#include "simulated_device/collectives.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>
#include <map>
#include <mutex>
#include <utility>

#include "simulated_device/streams.h"

namespace tessera::sim {
namespace {

using at::Tensor;
using c10d::Work;

c10::impl::VirtualGuardImpl guard() {
  return c10::impl::VirtualGuardImpl(kSim);
}

/// The tensors of one collective, by rank, as kernels see them.
struct Operands {
  std::vector<std::vector<Tensor>> inputs, outputs;
  std::size_t size() const { return inputs.size(); }
};
using Compute = std::function<void(Operands&)>;

/// A collective that some ranks have not started yet.
struct Started {
  std::string name;
  std::shared_ptr<Rendezvous> rendezvous;
  std::shared_ptr<Operands> operands;
  std::size_t num_joined = 0;
};

/// The collectives of a group that some of its ranks have not started yet, by name and number.
struct Shared {
  std::mutex mutex;
  std::map<std::string, Started> started;
};

class SimWork final : public Work {
 public:
  SimWork(const c10::Stream& stream, std::vector<Tensor> kept)
      : event_(kSim), device_(stream.device()), kept_(std::move(kept)) {
    event_.record(stream);
  }
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    event_.block(guard().getStream(device_));
    kept_.clear();
    return true;
  }
  void synchronize() override { wait(std::chrono::milliseconds(0)); }
  bool isCompleted() override { return event_.query(); }
  bool isSuccess() const override { return true; }

 private:
  c10::Event event_;
  at::Device device_;
  std::vector<Tensor> kept_;
};

Tensor piece_of(const Tensor& whole, std::size_t rank, std::size_t size) {
  const std::int64_t numel = whole.numel() / static_cast<std::int64_t>(size);
  return whole.view(-1).narrow(0, static_cast<std::int64_t>(rank) * numel, numel);
}

void compute_all_gather(Operands& of) {
  for (auto& output : of.outputs) {
    for (std::size_t from = 0; from < of.size(); ++from) {
      piece_of(output[0], from, of.size()).copy_(of.inputs[from][0].view(-1));
    }
  }
}

void compute_reduce_scatter(Operands& of) {
  for (std::size_t to = 0; to < of.size(); ++to) {
    const Tensor sum = piece_of(of.inputs[0][0], to, of.size()).clone();
    for (std::size_t from = 1; from < of.size(); ++from) {
      sum.add_(piece_of(of.inputs[from][0], to, of.size()));
    }
    of.outputs[to][0].view(-1).copy_(sum);
  }
}

void compute_all_reduce(Operands& of, bool is_max) {
  Tensor sum = of.outputs[0][0].clone();
  for (std::size_t from = 1; from < of.size(); ++from) {
    const Tensor& other = of.outputs[from][0];
    sum = is_max ? at::maximum(sum, other) : sum + other;
  }
  for (auto& output : of.outputs) output[0].copy_(sum);
}

/// `inputs[r]`: the tensors that rank r sends, by receiver. `outputs[r]`: those that it receives,
/// by sender.
void compute_all_to_all(Operands& of) {
  for (std::size_t to = 0; to < of.size(); ++to) {
    for (std::size_t from = 0; from < of.size(); ++from) {
      of.outputs[to][from].copy_(of.inputs[from][to]);
    }
  }
}

class SimBackend final : public c10d::Backend {
 public:
  SimBackend(std::shared_ptr<Shared> shared, int rank, int size, at::Device device)
      : Backend(rank, size),
        shared_(std::move(shared)),
        device_(device),
        stream_(guard().getNewStream(device, 0)) {}
  const std::string getBackendName() const override { return "sim"; }

  c10::intrusive_ptr<Work> _allgather_base(Tensor& output, Tensor& input,
                                           const c10d::AllgatherOptions& /*options*/) override {
    return start("all_gather", {input}, {output}, compute_all_gather);
  }
  c10::intrusive_ptr<Work> _reduce_scatter_base(
      Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& /*options*/) override {
    return start("reduce_scatter", {input}, {output}, compute_reduce_scatter);
  }
  c10::intrusive_ptr<Work> allreduce(std::vector<Tensor>& tensors,
                                     const c10d::AllreduceOptions& options) override {
    const bool is_max = options.reduceOp == c10d::ReduceOp::MAX;
    return start("all_reduce", {}, {tensors[0]},
                 [is_max](Operands& of) { compute_all_reduce(of, is_max); });
  }
  c10::intrusive_ptr<Work> broadcast(std::vector<Tensor>& tensors,
                                     const c10d::BroadcastOptions& options) override {
    const auto root = static_cast<std::size_t>(options.rootRank);
    return start("broadcast", {}, {tensors[0]}, [root](Operands& of) {
      for (std::size_t to = 0; to < of.size(); ++to) {
        if (to != root) of.outputs[to][0].copy_(of.outputs[root][0]);
      }
    });
  }
  c10::intrusive_ptr<Work> alltoall_base(Tensor& output, Tensor& input,
                                         std::vector<std::int64_t>& output_sizes,
                                         std::vector<std::int64_t>& input_sizes,
                                         const c10d::AllToAllOptions& /*options*/) override {
    return start("all_to_all", input.split_with_sizes(input_sizes),
                 output.split_with_sizes(output_sizes), compute_all_to_all);
  }
  c10::intrusive_ptr<Work> send(std::vector<Tensor>& tensors, int to, int /*tag*/) override {
    return start_pair(getRank(), to, 0, {tensors[0]}, {});
  }
  c10::intrusive_ptr<Work> recv(std::vector<Tensor>& tensors, int from, int /*tag*/) override {
    return start_pair(from, getRank(), 1, {}, {tensors[0]});
  }

 private:
  c10::intrusive_ptr<Work> start(const std::string& name, const std::vector<Tensor>& inputs,
                                 const std::vector<Tensor>& outputs, const Compute& compute) {
    return join("all", name, static_cast<std::size_t>(getSize()),
                static_cast<std::size_t>(getRank()), inputs, outputs, compute);
  }
  c10::intrusive_ptr<Work> start_pair(int from, int to, std::size_t place,
                                      const std::vector<Tensor>& inputs,
                                      const std::vector<Tensor>& outputs) {
    const std::string pair = std::to_string(from) + " to " + std::to_string(to);
    return join(pair, pair, 2, place, inputs, outputs,
                [](Operands& of) { of.outputs[1][0].copy_(of.inputs[0][0]); });
  }

  /// Takes part in the next collective among `ranks` (a text that names them). This rank is number
  /// `place` of `size` in it.
  c10::intrusive_ptr<Work> join(const std::string& ranks, const std::string& name, std::size_t size,
                                std::size_t place, const std::vector<Tensor>& inputs,
                                const std::vector<Tensor>& outputs, const Compute& compute) {
    std::vector<Tensor> kept = inputs;
    kept.insert(kept.end(), outputs.begin(), outputs.end());
    for (const Tensor& each : kept) {
      TORCH_CHECK(each.device() == device_ && each.is_contiguous(), "sim: ", name, " on rank ",
                  getRank(), " got a tensor on ", each.device(), ", not a contiguous one on ",
                  device_);
    }
    Job job{.rendezvous = rendezvous_of(ranks, name, size, place, inputs, outputs, compute),
            .rank = place};
    c10::Event before(kSim);
    before.record(guard().getStream(device_));
    before.block(stream_);
    submit(stream_, std::move(job), name, inputs, outputs);
    return c10::make_intrusive<SimWork>(stream_, std::move(kept));
  }

  std::shared_ptr<Rendezvous> rendezvous_of(const std::string& ranks, const std::string& name,
                                            std::size_t size, std::size_t place,
                                            const std::vector<Tensor>& inputs,
                                            const std::vector<Tensor>& outputs,
                                            const Compute& compute) {
    const std::lock_guard lock(shared_->mutex);
    const std::string key = ranks + " #" + std::to_string(num_started_[ranks]++);
    Started& started = shared_->started[key];
    if (!started.rendezvous) {
      started.name = name;
      started.rendezvous = std::make_shared<Rendezvous>(size);
      started.operands = std::make_shared<Operands>();
      started.operands->inputs.resize(size);
      started.operands->outputs.resize(size);
      started.rendezvous->body = [operands = started.operands, compute] { compute(*operands); };
    }
    TORCH_CHECK(started.name == name, "sim: rank ", getRank(), " starts ", name,
                ", but as the same collective another rank started ", started.name);
    for (const Tensor& each : inputs) started.operands->inputs[place].push_back(in_kernel(each));
    for (const Tensor& each : outputs) started.operands->outputs[place].push_back(in_kernel(each));
    const auto rendezvous = started.rendezvous;
    if (++started.num_joined == size) shared_->started.erase(key);
    return rendezvous;
  }

  std::shared_ptr<Shared> shared_;
  at::Device device_;
  c10::Stream stream_;
  std::map<std::string, int> num_started_;  // by the `ranks` of `join`
};

/// Returns the Shared of the group whose ranks use `store`.
std::shared_ptr<Shared> shared_by(const c10::intrusive_ptr<c10d::Store>& store, int rank) {
  static std::atomic<int> next = 0;
  static std::mutex mutex;
  static std::map<std::string, std::shared_ptr<Shared>> groups;
  if (rank == 0) store->set("sim_group", std::to_string(next++));
  const std::string id = store->get_to_str("sim_group");
  const std::lock_guard lock(mutex);
  auto& found = groups[id];
  if (!found) found = std::make_shared<Shared>();
  return found;
}

}  // namespace

dist::Transport transport(at::Device device) {
  return {.name = "sim",
          .device = device,
          .connects_one_rank = true,
          .connect = [device](const auto& store, int rank, int size, auto /*timeout*/) {
            return c10::make_intrusive<SimBackend>(shared_by(store, rank), rank, size, device);
          }};
}

}  // namespace tessera::sim
