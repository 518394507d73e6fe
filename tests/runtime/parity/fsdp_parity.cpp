// Trains a transformer from given values on given data, and writes the results; the peer
// tests/interop/fsdp1_peer.py does the same with PyTorch's FSDP1.
#include <cstdio>
#include <fstream>
#include <iostream>

#include "runtime/parity/parity_input.h"

namespace {

template <class Values>
std::string list_of(const Values& values) {
  std::string text;
  for (const auto& value : values) {
    if (!text.empty()) text += ",";
    if constexpr (std::is_convertible_v<decltype(value), std::string>) {
      text += '"' + std::string(value) + '"';
    } else {
      char number[32];
      std::snprintf(number, sizeof number, "%.9g", static_cast<double>(value));
      text += number;
    }
  }
  return "[" + text + "]";
}

void run(const std::string& input, const std::string& output) {
  const auto mesh = tessera::dist::init_from_env();
  const tessera::test::ParityInput data(input);
  const auto model = data.make_model();
  const at::Tensor& ids = data.ids;
  tessera::fully_shard(*model, {.mesh = mesh,
                                .policy = tessera::ModuleWrapPolicy<example::Block>(),
                                .backward_prefetch = tessera::BackwardPrefetch::none});
  std::ofstream out(output + std::to_string(mesh.rank()) + ".json");
  out << "{\"units\":[";
  bool is_first = true;
  for (const auto& info : tessera::handles(*model)) {
    std::vector<std::string> fqns;
    std::vector<std::int64_t> offsets;
    for (const auto& parameter : info.parameters) {
      fqns.push_back(parameter.fqn);
      offsets.push_back(parameter.offset);
    }
    out << (is_first ? "" : ",") << "{\"name\":\"" << info.module_fqn
        << "\",\"fqns\":" << list_of(fqns) << ",\"offsets\":" << list_of(offsets)
        << ",\"sharded_numel\":" << info.sharded_numel << "}";
    is_first = false;
  }
  out << "],\"shards\":{";
  is_first = true;
  for (const auto& parameter : model->named_parameters()) {
    const at::Tensor shard = parameter.value().detach().flatten();
    out << (is_first ? "" : ",") << '"' << parameter.key() << "\":"
        << list_of(std::vector<float>(shard.data_ptr<float>(),
                                      shard.data_ptr<float>() + shard.numel()));
    is_first = false;
  }
  torch::optim::AdamW optimizer(tessera::parameters(*model), torch::optim::AdamWOptions(1e-2));
  std::vector<double> losses;
  std::vector<double> norms;
  for (std::int64_t step = 0; step < ids.size(0); ++step) {
    const at::Tensor rows = ids[step].chunk(mesh.world_size())[mesh.rank()];
    const at::Tensor logits = tessera::forward(model, rows.narrow(1, 0, data.sequence()));
    const at::Tensor loss = torch::nn::functional::cross_entropy(
        logits.flatten(0, 1), rows.narrow(1, 1, data.sequence()).flatten());
    loss.backward();
    norms.push_back(tessera::clip_grad_norm_(*model, 0.5));
    optimizer.step();
    optimizer.zero_grad();
    losses.push_back(loss.item<double>());
  }
  out << "},\"order\":" << list_of(tessera::recorded_order(*model))
      << ",\"losses\":" << list_of(losses) << ",\"norms\":" << list_of(norms) << "}\n";
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: fsdp_parity INPUT.safetensors OUTPUT-PREFIX\n";
    return 2;
  }
  at::set_num_threads(1);
  try {
    run(argv[1], argv[2]);
  } catch (const std::exception& error) {
    std::cerr << "fsdp_parity: " << error.what() << '\n';
    return 1;
  }
  return 0;
}
