// Times training steps of a transformer; run under torchrun. Prints one JSON object on rank 0.
// tests/bench/peers_train_step.py does the same with PyTorch's own.
#include <sys/resource.h>

#include <chrono>
#include <cstdio>
#include <fstream>
#include <string>

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

std::int64_t peak_nbytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss * 1024;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 8) {
    std::fprintf(stderr, "usage: train_step WAY WIDTH LAYERS HEADS SEQUENCE BATCH STEPS\n");
    return 2;
  }
  const std::string way = argv[1];
  at::set_num_threads(1);
  const tessera::dist::Mesh mesh = tessera::dist::init_from_env();
  // What libraries take once is not counted.
  torch::mm(torch::ones({512, 512}, torch::requires_grad()), torch::ones({512, 512}))
      .sum()
      .backward();
  const std::int64_t before = resident_nbytes();
  example::Config config;
  config.width = std::stoll(argv[2]);
  config.num_layers = std::stoll(argv[3]);
  config.num_heads = std::stoll(argv[4]);
  config.sequence = std::stoll(argv[5]);
  const std::int64_t batch = std::stoll(argv[6]);
  const int num_steps = std::stoi(argv[7]);
  torch::manual_seed(0);
  const auto model = std::make_shared<example::TransformerImpl>(config);
  if (way == "replicate") {
    tessera::replicate(*model, {.mesh = mesh});
  } else if (way != "plain") {
    tessera::fully_shard(*model, {.mesh = mesh,
                                  .policy = tessera::ModuleWrapPolicy<example::Block>(),
                                  .strategy = way == "NO_SHARD"        ? tessera::NO_SHARD
                                              : way == "SHARD_GRAD_OP" ? tessera::SHARD_GRAD_OP
                                                                       : tessera::FULL_SHARD,
                                  .forward_prefetch = tessera::ForwardPrefetch::next});
  }
  torch::optim::AdamW optimizer(model->parameters(), 1e-4);
  const at::Tensor ids =
      torch::randint(config.vocabulary, {batch, config.sequence + 1}, torch::kLong);
  std::string seconds;
  double loss_value = 0;
  tessera::dist::Traffic traffic;
  for (int step = 0; step < num_steps; ++step) {
    const tessera::dist::Traffic so_far = mesh.world()->traffic();
    const auto begin = std::chrono::steady_clock::now();
    const at::Tensor input = ids.narrow(1, 0, config.sequence);
    const at::Tensor logits =
        way == "plain" ? model->forward(input) : tessera::forward(model, input);
    const at::Tensor loss = torch::nn::functional::cross_entropy(
        logits.flatten(0, 1), ids.narrow(1, 1, config.sequence).flatten());
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begin;
    loss_value = loss.item<double>();
    seconds += (step > 0 ? ", " : "") + std::to_string(passed.count());
    const tessera::dist::Traffic now = mesh.world()->traffic();
    traffic = {now.all_gather - so_far.all_gather, now.reduce_scatter - so_far.reduce_scatter,
               now.all_reduce - so_far.all_reduce, now.broadcast - so_far.broadcast};
  }
  if (mesh.rank() != 0) return 0;
  std::printf("{\"seconds\": [%s], \"peak_nbytes\": %lld, \"nbytes_sent\": %llu, \"loss\": %.6f}\n",
              seconds.c_str(), static_cast<long long>(peak_nbytes() - before),
              static_cast<unsigned long long>(traffic.all_gather + traffic.reduce_scatter +
                                              traffic.all_reduce + traffic.broadcast),
              loss_value);
}
