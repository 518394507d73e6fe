// Times saving and loading of a sharded model with AdamW's state; run under torchrun. Prints one
// JSON object on rank 0; tests/bench/peers_train_state.py does the same with PyTorch's own.
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "device.h"
#include "tessera/tessera.h"

namespace {

using tessera::dist::Mesh;

constexpr std::int64_t kWidth = 4096;

/// Returns the bytes in a line of /proc/self/status, such as VmRSS.
std::int64_t status_nbytes(const std::string& name) {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    std::int64_t kib = 0;
    if (word == name + ":" && status >> kib) return kib * 1024;
  }
  return 0;
}

/// Resets the peak of resident memory (VmHWM). Returns the bytes that are resident now.
std::int64_t begin_peak() {
  std::ofstream("/proc/self/clear_refs") << 5;
  return status_nbytes("VmRSS");
}

/// Bytes that this process has asked the system to read.
std::int64_t nbytes_read() {
  std::ifstream io("/proc/self/io");
  std::string name;
  std::int64_t value = 0;
  io >> name >> value;
  return value;
}

double sum_over_ranks(const Mesh& mesh, double value) {
  at::Tensor sum =
      torch::tensor({value}, at::TensorOptions(at::kDouble).device(tessera::bench::device()));
  mesh.world()->all_reduce(sum, "a sum").wait();
  return sum.item<double>();
}

double seconds_of(const std::function<void()>& body) {
  const auto begin = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

/// Returns the seconds from the moment when all ranks begin `body` to the last rank's end of it.
double seconds_of_all(const Mesh& mesh, const std::function<void()>& body) {
  sum_over_ranks(mesh, 0);
  return seconds_of([&] {
    body();
    sum_over_ranks(mesh, 0);
  });
}

/// Layers of kWidth x kWidth, and the state that AdamW has after a step: 12 bytes for a parameter.
class Trainer {
 public:
  Trainer(const Mesh& mesh, int num_layers) : mesh_(mesh) {
    for (int layer = 0; layer < num_layers; ++layer) {
      model_->push_back(torch::nn::Linear(torch::nn::LinearOptions(kWidth, kWidth).bias(false)));
    }
    model_->to(tessera::bench::device());
    tessera::fully_shard(*model_,
                         {.mesh = mesh, .policy = tessera::ModuleWrapPolicy<torch::nn::Linear>()});
    const at::NoGradGuard no_grad;
    for (const at::Tensor& parameter : model_->parameters()) {
      parameter.mutable_grad() = torch::zeros_like(parameter);
    }
    optimizer_ = std::make_unique<torch::optim::AdamW>(tessera::parameters(*model_), 1e-4);
    optimizer_->step();
    optimizer_->zero_grad();
    state_ = std::make_unique<tessera::TrainState>(model_, *optimizer_);
    before_ = begin_peak();
  }

  void save(const std::string& path, const tessera::SaveOptions& options) {
    make_room(path);
    if (options.async) {
      add("stall", stall_of(path, options));
      state_->wait();
      note_peak();
      add("memcpy", copy_once());
    } else {
      tessera::SaveReport report;
      add("seconds",
          seconds_of_all(mesh_, [&] { report = tessera::save(*state_, path, options); }));
      note(report);
      note_peak();
    }
  }

  void load(const std::string& path) {
    tessera::LoadSummary summary;
    const std::int64_t before = nbytes_read();
    add("seconds", seconds_of_all(mesh_, [&] { summary = tessera::load(*state_, path); }));
    note_peak();
    nbytes_read_ = sum_over_ranks(mesh_, static_cast<double>(nbytes_read() - before));
    nbytes_ = sum_over_ranks(mesh_, static_cast<double>(summary.nbytes_loaded));
  }

  std::string to_json() const {
    std::string json;
    for (const auto& [name, list] : seconds_) json += "\"" + name + "\": [" + list + "], ";
    return "{" + json + "\"nbytes\": " + std::to_string(nbytes_) +
           ", \"nbytes_read\": " + std::to_string(nbytes_read_) +
           ", \"num_plans\": " + std::to_string(num_plans_) +
           ", \"peak_nbytes\": " + std::to_string(peak_) + "}";
  }

 private:
  void add(const std::string& name, double seconds) {
    std::string& list = seconds_[name];
    list += (list.empty() ? "" : ", ") + std::to_string(seconds);
  }

  void note_peak() {
    if (from_.empty()) peak_ = status_nbytes("VmHWM") - before_;
  }

  void note(const tessera::SaveReport& report) {
    nbytes_ = sum_over_ranks(mesh_, static_cast<double>(report.nbytes_written));
    num_plans_ += report.has_planned ? 1 : 0;
  }

  /// Returns for how many seconds a save in the background blocked this rank.
  double stall_of(const std::string& path, const tessera::SaveOptions& options) {
    sum_over_ranks(mesh_, 0);
    const tessera::SaveReport report = tessera::save(*state_, path, options);
    copied_ = report.nbytes_written;
    note(report);
    return std::chrono::duration<double>(report.stalled).count();
  }

  /// Times a memcpy of as many bytes as this rank's snapshot has. All ranks copy at once.
  double copy_once() {
    if (from_.empty()) {
      from_.resize(copied_, 1);
      to_.resize(from_.size(), 2);
    }
    sum_over_ranks(mesh_, 0);
    return seconds_of([&] { std::memcpy(to_.data(), from_.data(), from_.size()); });
  }

  void make_room(const std::string& path) const {
    if (mesh_.rank() == 0) {
      std::filesystem::remove_all(path);
      ::sync();
    }
    sum_over_ranks(mesh_, 0);
  }

  Mesh mesh_;
  torch::nn::Sequential model_;
  std::unique_ptr<torch::optim::AdamW> optimizer_;
  std::unique_ptr<tessera::TrainState> state_;
  std::map<std::string, std::string> seconds_;
  std::int64_t before_ = 0;  // resident
  std::int64_t peak_ = 0;    // above before_, before copy_once has allocated its buffers
  std::vector<char> from_;
  std::vector<char> to_;
  std::uint64_t copied_ = 0;
  int num_plans_ = 0;
  double nbytes_ = 0;
  double nbytes_read_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 6) {
    std::fprintf(stderr, "usage: train_state save|async|load PATH native|dcp LAYERS ROUNDS\n");
    return 2;
  }
  const std::string way = argv[1];
  const Mesh mesh = tessera::bench::connect();
  Trainer trainer(mesh, std::stoi(argv[4]));
  tessera::SaveOptions options;
  options.format = std::string(argv[3]) == "dcp" ? tessera::formats::Format::dcp
                                                 : tessera::formats::Format::native;
  options.async = way == "async";
  for (int round = 0; round < std::stoi(argv[5]); ++round) {
    way == "load" ? trainer.load(argv[2]) : trainer.save(argv[2], options);
  }
  if (mesh.rank() == 0) std::printf("%s\n", trainer.to_json().c_str());
}
