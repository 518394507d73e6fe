// Trains a transformer from given values on given data, and writes what the run was like; the peer
// tests/interop/fsdp1_peer.py does the same with PyTorch's FSDP1. Run under torchrun.
#include <cstdio>
#include <fstream>
#include <iostream>

#include "tessera/base/file_system.h"
#include "tessera/base/json.h"
#include "tessera/formats/detect.h"
#include "tessera/tessera.h"
#include "train_transformer/model.h"

namespace {

using tessera::formats::CheckpointReader;

/// Returns a whole tensor of a checkpoint. Requires: one piece, of float32 or int64.
at::Tensor read_tensor(const CheckpointReader& reader, const std::string& name) {
  const auto& tensors = reader.contents().tensors;
  const auto* entry = reader.contents().find_tensor(name);
  if (entry == nullptr) throw std::runtime_error("no tensor " + name);
  const auto index = static_cast<std::size_t>(entry - tensors.data());
  at::Tensor tensor = torch::empty(
      entry->meta.shape, entry->meta.dtype == tessera::DType::int64 ? torch::kLong : torch::kFloat);
  reader.read_piece(index, 0, {0, tensor.numel()},
                    {static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes()});
  return tensor;
}

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
  const auto reader = tessera::formats::open_checkpoint(tessera::FileSystem::posix(), input);
  const at::Tensor ids = read_tensor(*reader, "ids");  // [steps, rows, sequence + 1]
  example::Config config;
  config.width = read_tensor(*reader, "embedding.weight").size(1);
  config.vocabulary = read_tensor(*reader, "embedding.weight").size(0);
  config.sequence = ids.size(2) - 1;
  config.num_layers = 3;
  config.num_heads = 2;
  const auto model = std::make_shared<example::TransformerImpl>(config);
  {
    const at::NoGradGuard no_grad;
    for (auto& parameter : model->named_parameters()) {
      parameter.value().copy_(read_tensor(*reader, parameter.key()));
    }
  }
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
    const at::Tensor part = parameter.value().detach().flatten();
    out << (is_first ? "" : ",") << '"' << parameter.key() << "\":"
        << list_of(
               std::vector<float>(part.data_ptr<float>(), part.data_ptr<float>() + part.numel()));
    is_first = false;
  }
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
  std::vector<double> losses;
  std::vector<double> norms;
  for (std::int64_t step = 0; step < ids.size(0); ++step) {
    const at::Tensor rows = ids[step].chunk(mesh.world_size())[mesh.rank()];
    const at::Tensor logits = tessera::forward(model, rows.narrow(1, 0, config.sequence));
    const at::Tensor loss = torch::nn::functional::cross_entropy(
        logits.flatten(0, 1), rows.narrow(1, 1, config.sequence).flatten());
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
