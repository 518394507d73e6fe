// Prints the learning rate after each step of a scheduler, from the start or from a checkpoint, and
// saves; the peer tests/interop/test_schedulers.py does the same with PyTorch.
#include <cstdio>
#include <iostream>

#include "tessera/tessera.h"

namespace {

/// A loss that gets better twice.
float loss_at(int step) {
  return step < 2 ? 4.0F - static_cast<float>(step) : 3.5F;
}

template <class Scheduler, class Step>
void run(torch::nn::Linear& model, torch::optim::SGD& optimizer, Scheduler& scheduler,
         const Step& take_step, const std::string& from, const std::string& to, int last) {
  int step = 0;
  tessera::TrainState state(model, optimizer);
  state.with("scheduler", scheduler).with("step", step);
  if (from != "-") tessera::load(state, from);
  while (step < last) {
    take_step(step++);
    std::printf("%.9g\n", optimizer.param_groups()[0].options().get_lr());
  }
  if (to != "-") tessera::save(state, to, {.format = tessera::formats::Format::dcp});
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    std::cerr << "usage: scheduler_parity step|as-python|plateau FROM TO LAST-STEP\n";
    return 2;
  }
  const std::string kind = argv[1];
  try {
    torch::nn::Linear model(2, 2);
    torch::optim::SGD optimizer(tessera::parameters(*model), torch::optim::SGDOptions(1));
    if (kind == "plateau") {
      using Plateau = torch::optim::ReduceLROnPlateauScheduler;
      Plateau scheduler(optimizer, Plateau::min, 0.5, /*patience=*/1, 1e-4, Plateau::rel,
                        /*cooldown=*/2);
      run(
          model, optimizer, scheduler, [&](int step) { scheduler.step(loss_at(step)); }, argv[2],
          argv[3], std::stoi(argv[4]));
    } else {
      torch::optim::StepLR scheduler(optimizer, 3, 0.5);
      if (kind == "as-python") scheduler.step();
      run(
          model, optimizer, scheduler, [&](int /*step*/) { scheduler.step(); }, argv[2], argv[3],
          std::stoi(argv[4]));
    }
  } catch (const std::exception& error) {
    std::cerr << "scheduler_parity: " << error.what() << '\n';
    return 1;
  }
  return 0;
}
