#include "runtime/support/checks.h"

namespace tessera::test {

std::map<std::string, at::Tensor> whole_gradients(const torch::nn::Module& model,
                                                  const dist::Mesh& mesh) {
  const at::NoGradGuard no_grad;
  const auto parameters = model.named_parameters();
  std::map<std::string, at::Tensor> whole;
  for (const FlatParameterInfo& info : handles(model)) {
    const bool is_whole = info.sharded_numel >= info.unpadded_numel;
    const std::int64_t first = is_whole ? 0 : mesh.rank() * info.sharded_numel;
    // Two columns: each element of the gradient, and 1 if the rank has a gradient there, else 0.
    at::Tensor own = torch::zeros({info.sharded_numel, 2}, torch::kDouble);
    for (const auto& parameter : info.parameters) {
      const std::string fqn =
          info.module_fqn.empty() ? parameter.fqn : info.module_fqn + "." + parameter.fqn;
      const at::Tensor& gradient = parameters[fqn].grad();
      if (!gradient.defined() || gradient.numel() == 0) continue;
      const std::int64_t begin = std::max<std::int64_t>(parameter.offset - first, 0);
      at::Tensor rows = own.narrow(0, begin, gradient.numel());
      rows.select(1, 0).copy_(gradient.flatten());
      rows.select(1, 1).fill_(1);
    }
    at::Tensor flat = own;
    if (!is_whole) {
      flat = torch::empty({info.sharded_numel * mesh.world_size(), 2}, torch::kDouble);
      mesh.world()->all_gather(flat, own, "gradients").wait();
    }
    for (const auto& parameter : info.parameters) {
      const std::string fqn =
          info.module_fqn.empty() ? parameter.fqn : info.module_fqn + "." + parameter.fqn;
      const at::Tensor rows = flat.narrow(0, parameter.offset, parameter.numel);
      if (rows.select(1, 1).eq(1).all().item<bool>()) {
        whole[fqn] = rows.select(1, 0).reshape(parameter.shape);
      }
    }
  }
  return whole;
}

void expect_gradients_of(const torch::nn::Module& unsharded, const torch::nn::Module& sharded,
                         const dist::Mesh& mesh, double factor, double tolerance) {
  const std::map<std::string, at::Tensor> found = whole_gradients(sharded, mesh);
  for (const auto& parameter : unsharded.named_parameters()) {
    const std::string& fqn = parameter.key();
    const at::Tensor& expected = parameter.value().grad();
    const auto it = found.find(fqn);
    if (it == found.end()) {
      // The parameter is a later name of a tied weight, has no gradient, or is ignored by
      // fully_shard. An ignored parameter keeps its own `.grad`.
      const at::Tensor own = sharded.named_parameters()[fqn].grad();
      EXPECT_TRUE(expected.defined() || !own.defined()) << fqn;
      continue;
    }
    ASSERT_TRUE(expected.defined()) << fqn << ": has a gradient, but not in the unsharded model";
    ASSERT_EQ(it->second.sizes(), expected.sizes()) << fqn;
    EXPECT_TRUE(torch::allclose(it->second, expected.to(torch::kDouble) * factor, tolerance,
                                tolerance / 100))
        << fqn << "\n"
        << it->second << "\n"
        << expected;
  }
}

}  // namespace tessera::test
