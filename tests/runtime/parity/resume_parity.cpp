// Trains a transformer from given values, or from a checkpoint, and saves it at the end; the peer
// tests/interop/resume_peer.py does the same with PyTorch.
#include <fstream>
#include <iostream>

#include "runtime/parity/parity_input.h"
#include "tessera/formats/format_driver.h"

namespace {

struct Arguments {
  std::string input;   // safetensors: parameters, and `ids` [steps, rows, sequence + 1]
  std::string from;    // a checkpoint to resume from; `-`: the input's values
  std::string to;      // where to save at the end; `-`: nowhere
  std::string format;  // of what is saved
  std::string way;     // FULL_SHARD, HYBRID_SHARD (2 x n), replicate
  std::int64_t first;  // the first step
  std::int64_t last;
  std::string output;  // prefix of a file of losses per rank
};

void run(const Arguments& arguments) {
  tessera::dist::MeshOptions mesh_options;
  if (arguments.way == "HYBRID_SHARD") mesh_options.axes = {{"replicate", 2}, {"shard", -1}};
  const auto mesh = tessera::dist::init_from_env(mesh_options);
  const tessera::test::ParityInput data(arguments.input);
  const auto model = data.make_model();
  const at::Tensor& ids = data.ids;
  if (arguments.way == "replicate") {
    tessera::replicate(*model, {.mesh = mesh});
  } else {
    const bool is_hybrid = arguments.way == "HYBRID_SHARD";
    tessera::fully_shard(*model,
                         {.mesh = mesh,
                          .policy = tessera::ModuleWrapPolicy<example::Block>(),
                          .strategy = is_hybrid ? tessera::HYBRID_SHARD : tessera::FULL_SHARD});
  }
  torch::optim::AdamW optimizer(tessera::parameters(*model), torch::optim::AdamWOptions(1e-2));
  tessera::TrainState state{model, optimizer};
  if (arguments.from != "-") tessera::load(state, arguments.from);
  std::ofstream out(arguments.output + std::to_string(mesh.rank()) + ".json");
  out.precision(17);
  out << "[";
  for (std::int64_t step = arguments.first; step < arguments.last; ++step) {
    const at::Tensor rows = ids[step].chunk(mesh.world_size())[mesh.rank()];
    const at::Tensor logits = tessera::forward(model, rows.narrow(1, 0, data.sequence()));
    const at::Tensor loss = torch::nn::functional::cross_entropy(
        logits.flatten(0, 1), rows.narrow(1, 1, data.sequence()).flatten());
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    at::Tensor mean = loss.detach().clone();
    mesh.world()->all_reduce(mean, "loss").wait();
    out << (step == arguments.first ? "" : ",") << mean.item<double>() / mesh.world_size();
  }
  out << "]\n";
  if (arguments.to == "-") return;
  tessera::SaveOptions options;
  options.flatten_optimizer_state_dict = arguments.format == "flattened";
  options.format = options.flatten_optimizer_state_dict
                       ? tessera::formats::Format::dcp
                       : *tessera::formats::parse_format(arguments.format);
  tessera::save(state, arguments.to, options);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 9) {
    std::cerr << "usage: resume_parity INPUT FROM TO FORMAT WAY FIRST LAST OUTPUT-PREFIX\n";
    return 2;
  }
  at::set_num_threads(1);
  try {
    run({argv[1], argv[2], argv[3], argv[4], argv[5], std::stoll(argv[6]), std::stoll(argv[7]),
         argv[8]});
  } catch (const std::exception& error) {
    std::cerr << "resume_parity: " << error.what() << '\n';
    return 1;
  }
  return 0;
}
