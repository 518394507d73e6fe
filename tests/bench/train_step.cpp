// Times training steps of a transformer; run under torchrun. Several ways take turns, step by step.
// Prints one JSON object on rank 0, with a member for each way; tests/bench/peers_train_step.py
// does the same with PyTorch's own.
#include <sys/resource.h>

#include <chrono>
#include <cstdio>
#include <fstream>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "device.h"
#include "tessera/tessera.h"
#include "train_transformer/model.h"

namespace {

std::int64_t resident_nbytes() {
  std::ifstream statm("/proc/self/statm");
  std::int64_t size = 0;
  std::int64_t resident = 0;
  statm >> size >> resident;
  return resident * 4096;
}

/// Returns the processor time of this process, of all its threads.
double cpu_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

/// A model that is trained in one way, and what its steps took.
class Trainer {
 public:
  Trainer(std::string name, const example::Config& config, const tessera::dist::Mesh& mesh,
          int num_backwards)
      : name_(std::move(name)),
        way_(name_.substr(0, name_.find('+'))),
        is_fused_(name_.ends_with("+fused")),
        mesh_(mesh),
        num_backwards_(num_backwards) {
    torch::manual_seed(0);
    model_ = std::make_shared<example::TransformerImpl>(config);
    model_->to(tessera::bench::device());
    if (way_ == "replicate") {
      tessera::replicate(*model_, {.mesh = mesh});
    } else if (is_wrapped()) {
      tessera::fully_shard(*model_, {.mesh = mesh,
                                     .policy = tessera::ModuleWrapPolicy<example::Block>(),
                                     .strategy = way_ == "NO_SHARD"        ? tessera::NO_SHARD
                                                 : way_ == "SHARD_GRAD_OP" ? tessera::SHARD_GRAD_OP
                                                                           : tessera::FULL_SHARD,
                                     .forward_prefetch = tessera::ForwardPrefetch::next});
    }
    optimizer_ = std::make_unique<torch::optim::AdamW>(tessera::parameters(*model_), 1e-4);
  }

  /// Shape of `ids`: [batch, sequence + 1].
  void step(const at::Tensor& ids) {
    const tessera::dist::Traffic before = mesh_.world()->traffic();
    tessera::bench::wait_for_device();
    const double cpu_before = cpu_seconds();
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 1; i < num_backwards_; ++i) {
      std::optional<tessera::NoSyncScope> no_sync;
      if (is_wrapped()) no_sync.emplace(*model_);
      train_on(ids);
    }
    const at::Tensor loss = train_on(ids);
    if (way_ == "lockstep") wait_for_ranks();
    if (is_fused_) {
      tessera::fused_step(*optimizer_);
    } else {
      optimizer_->step();
    }
    optimizer_->zero_grad();
    tessera::bench::wait_for_device();
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begin;
    const double cpu_passed = cpu_seconds() - cpu_before;
    loss_ = loss.item<double>();
    cpu_seconds_ += (cpu_seconds_.empty() ? "" : ", ") + std::to_string(cpu_passed);
    seconds_ += (seconds_.empty() ? "" : ", ") + std::to_string(passed.count());
    const tessera::dist::Traffic now = mesh_.world()->traffic();
    nbytes_sent_ = now.all_gather - before.all_gather + now.reduce_scatter - before.reduce_scatter +
                   now.all_reduce - before.all_reduce + now.broadcast - before.broadcast;
  }

  /// Whether Tessera averages gradients: "plain" and "lockstep" train on each rank alone.
  bool is_wrapped() const { return way_ != "plain" && way_ != "lockstep"; }

  /// Waits until all ranks are here, as they would be for an average of gradients. Collective.
  void wait_for_ranks() {
    const at::Tensor one = torch::ones({1}, tessera::bench::device());
    mesh_.world()->all_reduce(one, "wait").wait();
  }

  at::Tensor train_on(const at::Tensor& ids) {
    const at::Tensor input = ids.narrow(1, 0, ids.size(1) - 1);
    const at::Tensor logits =
        is_wrapped() ? tessera::forward(model_, input) : model_->forward(input);
    const at::Tensor loss = torch::nn::functional::cross_entropy(
        logits.flatten(0, 1), ids.narrow(1, 1, ids.size(1) - 1).flatten());
    loss.backward();
    return loss;
  }

  /// Returns the member for JSON. `peak`: of the process, and so of all trainers in it.
  std::string to_json(std::int64_t peak) const {
    return "\"" + name_ + "\": {\"seconds\": [" + seconds_ + "], \"cpu_seconds\": [" +
           cpu_seconds_ + "], \"peak_nbytes\": " + std::to_string(peak) +
           ", \"nbytes_sent\": " + std::to_string(nbytes_sent_) +
           ", \"loss\": " + std::to_string(loss_) + "}";
  }

 private:
  std::string name_;  // of the way; with "+fused" the optimizer steps by fused_step
  std::string way_;
  bool is_fused_;
  tessera::dist::Mesh mesh_;
  int num_backwards_;  // in a step, all but the last one under NoSyncScope
  std::shared_ptr<example::TransformerImpl> model_;
  std::unique_ptr<torch::optim::AdamW> optimizer_;
  std::string seconds_;
  std::string cpu_seconds_;
  std::uint64_t nbytes_sent_ = 0;  // in the last step
  double loss_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 9) {
    std::fprintf(
        stderr,
        "usage: train_step WAY[+fused][,...] WIDTH LAYERS HEADS SEQUENCE BATCH BACKWARDS STEPS\n");
    return 2;
  }
  at::set_num_threads(1);
  const tessera::dist::Mesh mesh = tessera::bench::connect();
  // Lets libraries allocate what they keep, so that it does not count as memory of the training.
  torch::mm(torch::ones({512, 512}, torch::requires_grad()), torch::ones({512, 512}))
      .sum()
      .backward();
  const std::int64_t before = tessera::bench::device().is_cpu() ? resident_nbytes() : 0;
  example::Config config;
  config.width = std::stoll(argv[2]);
  config.num_layers = std::stoll(argv[3]);
  config.num_heads = std::stoll(argv[4]);
  config.sequence = std::stoll(argv[5]);
  std::vector<Trainer> trainers;
  std::istringstream ways(argv[1]);
  for (std::string way; std::getline(ways, way, ',');) {
    trainers.emplace_back(way, config, mesh, std::stoi(argv[7]));
  }
  const at::Tensor ids =
      torch::randint(config.vocabulary, {std::stoll(argv[6]), config.sequence + 1},
                     at::TensorOptions(at::kLong).device(tessera::bench::device()));
  for (int step = 0; step < std::stoi(argv[8]); ++step) {
    for (Trainer& trainer : trainers) trainer.step(ids);
  }
  if (mesh.rank() != 0) return 0;
  std::string json;
  for (const Trainer& trainer : trainers) {
    json += (json.empty() ? "{" : ", ") + trainer.to_json(tessera::bench::peak_nbytes() - before);
  }
  std::printf("%s}\n", json.c_str());
}
