#include "runtime/state/optimizers.h"

namespace tessera::test {

namespace optim = torch::optim;

std::string name_of(OptimizerKind kind) {
  switch (kind) {
    case OptimizerKind::sgd_momentum:
      return "SgdMomentum";
    case OptimizerKind::adamw_two_groups:
      return "AdamWTwoGroups";
    case OptimizerKind::adam_amsgrad:
      return "AdamAmsgrad";
    case OptimizerKind::adagrad:
      return "Adagrad";
    case OptimizerKind::rmsprop:
      return "RMSprop";
  }
  return "";
}

std::unique_ptr<optim::Optimizer> make_optimizer(OptimizerKind kind,
                                                 std::vector<at::Tensor> parameters, double lr) {
  switch (kind) {
    case OptimizerKind::sgd_momentum:
      return std::make_unique<optim::SGD>(parameters,
                                          optim::SGDOptions(lr).momentum(0.9).weight_decay(0.01));
    case OptimizerKind::adamw_two_groups: {
      std::vector<at::Tensor> thirds;
      std::vector<at::Tensor> rest;
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        (i % 3 == 0 ? thirds : rest).push_back(parameters[i]);
      }
      std::vector<optim::OptimizerParamGroup> groups;
      groups.emplace_back(
          thirds, std::make_unique<optim::AdamWOptions>(optim::AdamWOptions(lr).weight_decay(0)));
      groups.emplace_back(rest, std::make_unique<optim::AdamWOptions>(
                                    optim::AdamWOptions(2 * lr).betas({0.8, 0.99})));
      return std::make_unique<optim::AdamW>(groups, optim::AdamWOptions(lr));
    }
    case OptimizerKind::adam_amsgrad:
      return std::make_unique<optim::Adam>(parameters, optim::AdamOptions(lr).amsgrad(true));
    case OptimizerKind::adagrad:
      return std::make_unique<optim::Adagrad>(parameters, optim::AdagradOptions(lr).lr_decay(0.01));
    case OptimizerKind::rmsprop:
      return std::make_unique<optim::RMSprop>(
          parameters, optim::RMSpropOptions(lr).momentum(0.9).centered(true));
  }
  return nullptr;
}

}  // namespace tessera::test
