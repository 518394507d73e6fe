#include <gmock/gmock.h>
#include <torch/torch.h>

#include <cstdlib>

#include "runtime/state/configurations.h"
#include "runtime/support/counting_allocator.h"
#include "runtime/support/processes.h"
#include "runtime/support/resident_memory.h"
#include "support/temporary_directory.h"

// Memory that saving, loading and state dicts take in addition to the state itself.

namespace tessera {
namespace {

using test::peak_growth;

constexpr const char* kDirectory = "TESSERA_TEST_SAVES";
constexpr std::int64_t kMib = std::int64_t{1} << 20;
constexpr std::int64_t kWidth = 1024;
constexpr std::int64_t kLayerNbytes = kWidth * kWidth * 4;
constexpr std::int64_t kLastNbytes = 8 * kLayerNbytes;  // the largest unit, one tensor
constexpr std::int64_t kModelNbytes = 12 * kLayerNbytes + kLastNbytes;

/// A model whose state is much larger than every buffer.
struct WideImpl : torch::nn::Module {
  WideImpl() {
    const auto layer = [](std::int64_t outputs) {
      return torch::nn::Linear(torch::nn::LinearOptions(kWidth, outputs).bias(false));
    };
    for (int i = 0; i < 12; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), layer(kWidth)));
    }
    layers.push_back(register_module("last", layer(8 * kWidth)));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) x = layer->forward(x);
    return x;
  }
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Wide);

/// A trainer on one of two ranks: half of the parameters, and AdamW's state, twice as large.
struct WideTrainer {
  explicit WideTrainer(const dist::Mesh& mesh) {
    fully_shard(*model, {.mesh = mesh, .policy = ModuleWrapPolicy<torch::nn::Linear>()});
    optimizer.emplace(model->parameters(), 0.01);
  }
  void train() {
    forward(model, torch::ones({1, kWidth})).sum().backward();
    optimizer->step();
    optimizer->zero_grad();
  }
  Wide model;
  std::optional<torch::optim::AdamW> optimizer;
};

TEST(StateMemoryTest, DISABLED_SavingAsOneRank) {
  test::as_process([](const dist::Mesh& mesh) -> std::string {
    test::give_back_freed_memory();
    WideTrainer trainer(mesh);
    trainer.train();
    TrainState state(trainer.model, *trainer.optimizer);
    const std::string path = std::string(std::getenv(kDirectory)) + "/a";
    using Compression = formats::NativeWriteOptions::Compression;
    for (const std::int64_t memory_nbytes : {64 * kMib, 16 * kMib}) {
      for (const Compression compression : {Compression::none, Compression::zstd}) {
        for (const formats::Format format : {formats::Format::native, formats::Format::dcp}) {
          SaveOptions options{.format = format, .overwrite = OverwritePolicy::replace};
          options.native.compression = compression;
          options.memory_nbytes = static_cast<std::uint64_t>(memory_nbytes);
          EXPECT_LE(peak_growth([&] { save(state, path, options); }), memory_nbytes)
              << format.name() << (compression == Compression::zstd ? ", compressed" : "");
        }
      }
    }
    return "";
  });
}

TEST(StateMemoryTest, DISABLED_LoadingAsOneRank) {
  test::as_process([](const dist::Mesh& mesh) -> std::string {
    test::give_back_freed_memory();
    for (const formats::Format format : {formats::Format::native, formats::Format::dcp}) {
      const std::string path =
          std::string(std::getenv(kDirectory)) + "/" + std::string(format.name());
      {
        WideTrainer trainer(mesh);
        trainer.train();
        TrainState state(trainer.model, *trainer.optimizer);
        save(state, path, {.format = format});
      }
      for (const std::int64_t memory_nbytes : {64 * kMib, 16 * kMib}) {
        const LoadOptions options{.memory_nbytes = static_cast<std::uint64_t>(memory_nbytes)};
        WideTrainer trainer(mesh);
        TrainState state(trainer.model, *trainer.optimizer);
        const std::int64_t optimizer_nbytes = 2 * kModelNbytes / mesh.world_size();
        EXPECT_LE(peak_growth([&] { load(state, path, options); }),
                  optimizer_nbytes + memory_nbytes);
        EXPECT_LE(peak_growth([&] { load(state, path, options); }), memory_nbytes) << "again";
      }
    }
    return "";
  });
}

TEST(StateMemoryTest, DISABLED_StateDictAsOneRank) {
  test::as_process([](const dist::Mesh& mesh) -> std::string {
    test::give_back_freed_memory();
    WideTrainer trainer(mesh);
    trainer.train();  // opens all connections
    const StateDictOptions options{.offload_to_cpu = true, .rank0_only = true};
    StateDict whole;
    const std::int64_t peak = peak_growth([&] { whole = state_dict(*trainer.model, options); });
    EXPECT_LE(peak, mesh.rank() == 0 ? kModelNbytes + kLastNbytes : kLayerNbytes);
    return "";
  });
}

void run_on_two(const std::string& test) {
  const test::TemporaryDirectory directory;
  test::run_processes(2, "StateMemoryTest.DISABLED_" + test,
                      {.environment = {{kDirectory, directory.path()}}});
}

// Shows A4.
TEST(StateMemoryTest, SavingTakesItsBuffersBesideTheState) {
  run_on_two("SavingAsOneRank");
}

// Shows A4.
TEST(StateMemoryTest, LoadingTakesItsBuffersBesideTheState) {
  run_on_two("LoadingAsOneRank");
}

// Shows C2.
TEST(StateMemoryTest, AFullStateDictOnRankZeroIsGatheredUnitByUnit) {
  run_on_two("StateDictAsOneRank");
}

/// Counted by libtorch's allocator: rank 0 takes one shard in addition to the result, other ranks
/// nothing.
/// Shows C2.
TEST(StateMemoryTest, RanksThatOnlySendTakeNoMemory) {
  test::allocated_memory();  // counts from here on
  for (const test::Configuration& configuration : test::configurations({2, 4})) {
    test::on_ranks(
        configuration.world_size,
        [&](const dist::Mesh& mesh) {
          test::Transformer model = test::seeded<test::Transformer>();
          configuration.apply(model, mesh);
          std::int64_t whole_nbytes = 0;
          std::int64_t largest_nbytes = 0;
          for (const auto& item : state_dict(*model)) {
            const auto* tensor = std::get_if<StateTensor>(&item.entry);
            if (tensor == nullptr) continue;
            const auto nbytes = static_cast<std::int64_t>(tensor->tensor(item.fqn).nbytes());
            whole_nbytes += nbytes;
            largest_nbytes = std::max(largest_nbytes, nbytes);
          }
          const std::int64_t before = test::allocated_memory().now;
          test::reset_peak();
          const StateDict whole = state_dict(*model, {.rank0_only = true});
          const std::int64_t peak = test::allocated_memory().peak - before;
          EXPECT_LE(peak, mesh.rank() == 0 ? whole_nbytes + largest_nbytes : 0)
              << configuration.name();
        },
        configuration.mesh_options());
  }
}

TEST(StateMemoryTest, ASaveKeepsNoCopyOfWhatIsNotContiguous) {
  struct TransposedImpl : torch::nn::Module {
    TransposedImpl() { weight = register_parameter("weight", torch::ones({512, 1024}).t()); }
    at::Tensor weight;
  };
  const test::TemporaryDirectory directory;
  const auto model = std::make_shared<TransposedImpl>();
  TrainState state(model);
  const std::int64_t before = test::allocated_memory().now;
  save(state, directory.path() + "/a");
  EXPECT_LE(test::allocated_memory().now - before, std::int64_t{64} << 10);
}

}  // namespace
}  // namespace tessera
