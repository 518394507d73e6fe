#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <random>

#include "runtime/support/checks.h"
#include "support/random.h"

// Draws models, ways to shard and replicate them, and which parts each rank uses in each step.
// Compares every gradient, every loss, and the parameters after the last step with those of the
// unsharded model. `TESSERA_TEST_SEED` repeats a run, `TESSERA_RANDOM_MODEL` one case of it;
// `TESSERA_RANDOM_MODELS` sets the number of cases per world.

namespace tessera {
namespace {

constexpr int kWidth = 4;

/// A generator that gives the same numbers on all ranks, whatever other threads draw.
class Drawn {
 public:
  explicit Drawn(std::uint64_t seed) : engine_(seed) {}
  std::uint64_t below(std::uint64_t end) { return engine_() % end; }
  bool chance(int percent) { return below(100) < static_cast<std::uint64_t>(percent); }
  at::Tensor tensor(at::IntArrayRef shape) {
    at::Tensor drawn = torch::empty(shape);
    float* const numbers = drawn.mutable_data_ptr<float>();
    for (std::int64_t i = 0; i < drawn.numel(); ++i) {
      numbers[i] = static_cast<float>(below(2001)) / 1000.0F - 1.0F;
    }
    return drawn;
  }
  template <class T>
  void shuffle(std::vector<T>& items) {
    for (std::size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[below(i)]);
  }

 private:
  std::mt19937_64 engine_;
};

/// Determines which optional nodes one rank uses in one forward, and in which order.
struct Use {
  std::uint64_t seed = 0;
  Drawn at(int node) const { return Drawn(seed * 1000003 + static_cast<std::uint64_t>(node)); }
};

/// A node of a model: a layer, or a group of nodes.
struct NodeImpl : torch::nn::Module {
  enum class Kind { linear, norm, scale, by_hand, tied, group };

  at::Tensor forward(const at::Tensor& x, const Use& use) {
    switch (kind) {
      case Kind::linear:
        return linear->forward(x);
      case Kind::norm:
        return norm->forward(x);
      case Kind::scale:
        return x * weight;
      case Kind::by_hand:
        return torch::matmul(x, weight.t()) + bias;  // does not use the parameter `unused`
      case Kind::tied:
        return torch::matmul(x, weight);
      case Kind::group:
        break;
    }
    std::vector<std::size_t> order(nodes.size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    Drawn drawn = use.at(number);
    if (has_varying_order) drawn.shuffle(order);
    at::Tensor y = x;
    for (const std::size_t i : order) {
      const bool is_used = !is_optional[i] || drawn.chance(50);
      if (!is_used) continue;
      const auto& node = nodes[i];
      const at::Tensor z = recomputation
                               ? recompute({.recomputation = *recomputation}, node, y, use)
                               : node->forward(y, use);
      y = 0.5 * y + 0.5 * torch::tanh(z);
    }
    return y;
  }

  Kind kind = Kind::group;
  int number = 0;
  torch::nn::Linear linear{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  at::Tensor weight, bias, unused;
  std::vector<std::shared_ptr<NodeImpl>> nodes;
  std::vector<bool> is_optional;  // parallel to nodes
  bool has_varying_order = false;
  std::optional<Recomputation> recomputation;
};
using Node = std::shared_ptr<NodeImpl>;

/// Builds the same model for the same seed.
class ModelDraw {
 public:
  explicit ModelDraw(std::uint64_t seed) : drawn_(seed) {
    is_uneven_ = drawn_.chance(70);
    may_recompute_ = drawn_.chance(25);
    root_ = draw_group(0);
    // A layer that is always used and trained, so that every loss has a gradient.
    add(*root_, draw(NodeImpl::Kind::linear, 1), false);
    for (at::Tensor& parameter : root_->nodes.back()->parameters()) parameter.requires_grad_(true);
    std::swap(all_[all_.size() - 2], all_.back());
  }
  const Node& root() const { return root_; }
  const std::vector<Node>& all() const { return all_; }

 private:
  Node draw(NodeImpl::Kind kind, int depth) {
    using Kind = NodeImpl::Kind;
    if (kind == Kind::group) return draw_group(depth);
    auto node = std::make_shared<NodeImpl>();
    node->kind = kind;
    node->number = num_nodes_++;
    switch (kind) {
      case Kind::linear:
        node->linear = node->register_module("linear", torch::nn::Linear(kWidth, kWidth));
        break;
      case Kind::norm:
        node->norm = node->register_module(
            "norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
        break;
      case Kind::scale:
        // Some never required a gradient: libtorch has no autograd metadata for them.
        node->weight = node->register_parameter("weight", drawn_.tensor({kWidth}),
                                                /*requires_grad=*/drawn_.chance(50));
        break;
      case Kind::by_hand:
        node->weight = node->register_parameter("weight", drawn_.tensor({kWidth, kWidth}));
        node->bias = node->register_parameter("bias", drawn_.tensor({kWidth}));
        if (drawn_.chance(30)) {
          node->unused = node->register_parameter("unused", drawn_.tensor({3}));
        }
        break;
      case Kind::tied:
        node->weight = node->register_parameter("weight", weight_to_tie());
        break;
      case Kind::group:
        break;
    }
    const at::NoGradGuard no_grad;
    for (at::Tensor& parameter : node->parameters()) {
      if (kind != Kind::tied) parameter.copy_(drawn_.tensor(parameter.sizes()));
    }
    if (kind != Kind::tied && drawn_.chance(10)) {
      for (at::Tensor& parameter : node->parameters()) parameter.requires_grad_(false);
    }
    all_.push_back(node);
    return node;
  }

  at::Tensor weight_to_tie() {
    std::vector<at::Tensor> weights;
    for (const Node& node : all_) {
      if (node->kind == NodeImpl::Kind::linear) weights.push_back(node->linear->weight);
      if (node->kind == NodeImpl::Kind::by_hand) weights.push_back(node->weight);
    }
    if (weights.empty()) return drawn_.tensor({kWidth, kWidth}).requires_grad_();
    return weights[drawn_.below(weights.size())];
  }

  Node draw_group(int depth) {
    using Kind = NodeImpl::Kind;
    auto group = std::make_shared<NodeImpl>();
    group->number = num_nodes_++;
    group->has_varying_order = is_uneven_ && drawn_.chance(15);
    if (may_recompute_ && drawn_.chance(40)) {
      group->recomputation = static_cast<Recomputation>(drawn_.below(2));
    }
    const std::size_t num_parts = 1 + drawn_.below(depth == 0 ? 4 : 3);
    for (std::size_t i = 0; i < num_parts; ++i) {
      const bool is_optional = is_uneven_ && drawn_.chance(40);
      if (!all_.empty() && drawn_.chance(10)) {
        add(*group, all_[drawn_.below(all_.size())], is_optional);  // a second place for a node
        continue;
      }
      const auto kind = static_cast<Kind>(drawn_.below(depth < 2 ? 8 : 5));
      add(*group, draw(kind > Kind::group ? Kind::group : kind, depth + 1), is_optional);
    }
    all_.push_back(group);
    return group;
  }

  static void add(NodeImpl& group, const Node& node, bool is_optional) {
    group.register_module("node" + std::to_string(group.nodes.size()), node);
    group.nodes.push_back(node);
    group.is_optional.push_back(is_optional);
  }

  Drawn drawn_;
  bool is_uneven_ = false;
  bool may_recompute_ = false;
  int num_nodes_ = 0;
  std::vector<Node> all_;  // inner nodes before the groups that contain them
  Node root_;
};

bool is_within(const NodeImpl& node, const NodeImpl& group) {
  return &node == &group ||
         std::ranges::any_of(group.nodes, [&](const Node& each) { return is_within(node, *each); });
}

/// Returns whether no module or weight of a node is also used outside of it.
bool stands_alone(const NodeImpl& node, const ModelDraw& model) {
  const std::vector<at::Tensor> weights = node.parameters();
  for (const Node& other : model.all()) {
    if (is_within(*other, node)) continue;
    for (const Node& child : other->nodes) {
      if (child.get() != &node && is_within(*child, node)) return false;
    }
    if (other->kind == NodeImpl::Kind::group) continue;
    for (const at::Tensor& weight : other->parameters()) {
      if (std::ranges::any_of(weights,
                              [&](const at::Tensor& each) { return each.is_same(weight); })) {
        return false;
      }
    }
  }
  return true;
}

bool has_applied(const NodeImpl& node) {
  return std::ranges::any_of(node.modules(), [](const auto& module) {
    return registry::applied_api(*module).has_value();
  });
}

/// Applies fully_shard, and replicate, from the inside out, with options drawn for each unit.
void shard(const ModelDraw& model, Drawn drawn, const dist::Mesh& mesh) {
  const bool is_hybrid = mesh.axes().size() == 2;
  const std::vector<ShardingStrategy> strategies =
      is_hybrid ? std::vector{HYBRID_SHARD, HYBRID_SHARD_ZERO2, NO_SHARD}
                : std::vector{FULL_SHARD, SHARD_GRAD_OP, NO_SHARD};
  const bool mixes_strategies = drawn.chance(30);
  const ShardingStrategy common = strategies[drawn.below(3)];
  const int percent = static_cast<int>(drawn.below(100));  // of nodes that become units
  const int percent_replicated = drawn.chance(10) ? 40 : 0;
  for (const Node& node : model.all()) {
    const bool is_root = node == model.root();
    if (!is_root && drawn.chance(percent_replicated) && !has_applied(*node) &&
        stands_alone(*node, model)) {
      replicate(*node, {.mesh = mesh, .bucket_nbytes = drawn.chance(50) ? 1 : 100});
    }
    if (!is_root && !drawn.chance(percent)) continue;
    if (registry::applied_api(*node)) continue;
    FullyShardOptions options;
    options.mesh = mesh;
    options.strategy = mixes_strategies ? strategies[drawn.below(3)] : common;
    options.backward_prefetch = static_cast<BackwardPrefetch>(drawn.below(3));
    options.forward_prefetch = static_cast<ForwardPrefetch>(drawn.below(2));
    options.freed_parameters = static_cast<FreedParameters>(drawn.below(2));
    fully_shard(*node, options);
  }
}

/// One thing that a trainer does, the same on all ranks.
enum class Action {
  train,         // forward, backward
  accumulate,    // the same under NoSyncScope
  two_forwards,  // and one backward through both
  twice,         // two backwards through one forward
  evaluate,      // a forward without gradients
  drop,          // a forward with gradients whose result is dropped
  fail,          // a forward that throws on one rank
};

class Case {
 public:
  Case(std::uint64_t seed, const dist::Mesh& mesh)
      : mesh_(mesh), drawn_(seed), unsharded_(seed + 1), sharded_(seed + 1) {
    shard(sharded_, Drawn(seed + 2), mesh);
  }

  void run() {
    const std::size_t num_actions = 2 + drawn_.below(5);
    for (std::size_t i = 0; i < num_actions && !::testing::Test::HasFailure(); ++i) {
      const bool is_last = i + 1 == num_actions;
      const std::uint64_t drawn = drawn_.below(14);
      const auto action = is_last || drawn >= 7 ? Action::train : static_cast<Action>(drawn);
      SCOPED_TRACE("action " + std::to_string(i) + ": " + std::to_string(static_cast<int>(action)));
      act(action);
    }
    if (!::testing::Test::HasFailure()) expect_parameters();
  }

 private:
  /// The batch of one rank in one forward. Every rank can compute it from the seed.
  struct Batch {
    at::Tensor x;
    Use use;
  };
  Batch batch_of(int rank, std::uint64_t seed) const {
    Drawn drawn(seed * 31 + static_cast<std::uint64_t>(rank));
    return {drawn.tensor({2, kWidth}), {drawn.below(1 << 30)}};
  }

  at::Tensor output(std::uint64_t seed) {
    const Batch batch = batch_of(mesh_.rank(), seed);
    return forward(*sharded_.root(), batch.x, batch.use).pow(2).sum();
  }
  /// Returns the unsharded model's loss for this rank's batch.
  at::Tensor expected_output(std::uint64_t seed) {
    const Batch batch = batch_of(mesh_.rank(), seed);
    return unsharded_.root()->forward(batch.x, batch.use).pow(2).sum();
  }
  void expect_loss(const at::Tensor& loss, const at::Tensor& expected) {
    const at::NoGradGuard no_grad;
    EXPECT_TRUE(torch::allclose(loss.detach(), expected, 1e-3, 1e-5)) << loss << expected;
  }
  /// Adds the average over the ranks of the gradients of `loss` to those of the unsharded model.
  void add_expected_gradients(const at::Tensor& loss) {
    std::vector<at::Tensor> parameters = test::unique_parameters(*unsharded_.root());
    std::vector<at::Tensor> before;
    for (at::Tensor& each : parameters) {
      before.push_back(std::exchange(each.mutable_grad(), at::Tensor()));
    }
    (loss / mesh_.world_size()).backward();
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> pieces;  // of each parameter its gradient, and whether there is one
    for (const at::Tensor& each : parameters) {
      const bool has_one = each.grad().defined();
      pieces.push_back(has_one ? each.grad().flatten() : torch::zeros({each.numel()}));
      pieces.push_back(torch::full({1}, has_one ? 1.0F : 0.0F));
    }
    const at::Tensor flat = torch::cat(pieces);
    mesh_.world()->all_reduce(flat, "expected gradients").wait();
    std::int64_t offset = 0;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      at::Tensor& each = parameters[i];
      const at::Tensor sum = flat.narrow(0, offset, each.numel()).view(each.sizes());
      offset += each.numel() + 1;
      each.mutable_grad() = before[i];
      if (flat[offset - 1].item<float>() == 0) continue;
      each.mutable_grad() = before[i].defined() ? before[i] + sum : sum.clone();
    }
  }

  void act(Action action) {
    const std::uint64_t seed = drawn_.below(1 << 20);
    switch (action) {
      case Action::train:
        return train(seed);
      case Action::accumulate: {
        const NoSyncScope no_sync(*sharded_.root());
        const at::Tensor loss = output(seed);
        const at::Tensor expected = expected_output(seed);
        expect_loss(loss, expected);
        loss.backward();
        return add_expected_gradients(expected);
      }
      case Action::two_forwards: {
        const at::Tensor first = output(seed);
        const at::Tensor second = output(seed + 1);
        (first + second).backward();
        add_expected_gradients(expected_output(seed));
        add_expected_gradients(expected_output(seed + 1));
        return expect_gradients();
      }
      case Action::twice: {
        const at::Tensor loss = output(seed);
        loss.backward({}, /*retain_graph=*/true);
        loss.backward();
        add_expected_gradients(2 * expected_output(seed));
        return expect_gradients();
      }
      case Action::evaluate: {
        const at::NoGradGuard no_grad;
        return expect_loss(output(seed), expected_output(seed));
      }
      case Action::drop:
        return expect_loss(output(seed), expected_output(seed));
      case Action::fail:
        return fail(seed);
    }
  }

  void train(std::uint64_t seed) {
    const at::Tensor loss = output(seed);
    const at::Tensor expected = expected_output(seed);
    expect_loss(loss, expected);
    loss.backward();
    add_expected_gradients(expected);
    expect_gradients();
    if (drawn_.chance(70)) {
      step(*sharded_.root());
      step(*unsharded_.root());
    }
    const std::size_t chosen = drawn_.below(sharded_.all().size());
    if (drawn_.chance(15) && !is_replicated(*sharded_.all()[chosen])) {
      turn(*sharded_.all()[chosen]);
      turn(*unsharded_.all()[chosen]);
    }
  }

  void fail(std::uint64_t seed) {
    const int failing = static_cast<int>(seed % static_cast<std::uint64_t>(mesh_.world_size()));
    const std::string error = test::error_of([&] {
      const ForwardScope scope(*sharded_.root());
      const Batch batch = batch_of(mesh_.rank(), seed);
      const at::NoGradGuard no_grad;  // the output is dropped anyway
      if (mesh_.rank() != failing || seed % 2 == 0) sharded_.root()->forward(batch.x, batch.use);
      if (mesh_.rank() == failing) throw std::runtime_error("the user's own");
    });
    const bool has_gathers =
        std::ranges::any_of(handles(*sharded_.root()), [](const FlatParameterInfo& info) {
          return info.sharded_numel < info.unpadded_numel || info.strategy != NO_SHARD;
        });
    if (mesh_.rank() == failing) {
      EXPECT_EQ(error, "the user's own");
    } else if (has_gathers) {
      EXPECT_NE(error, "none");
    }
  }

  /// A step of plain SGD.
  static void step(torch::nn::Module& model) {
    const at::NoGradGuard no_grad;
    for (at::Tensor& parameter : test::unique_parameters(model)) {
      if (!parameter.grad().defined()) continue;
      parameter.sub_(parameter.grad() * 0.05);
      parameter.mutable_grad() = at::Tensor();
    }
  }
  /// Freezes a node, or unfreezes it. Not the last one, which every loss needs.
  void turn(NodeImpl& node) const {
    if (node.kind == NodeImpl::Kind::group || node.number == last_node()) return;
    for (at::Tensor& parameter : node.parameters()) {
      parameter.requires_grad_(!parameter.requires_grad());
      parameter.mutable_grad() = at::Tensor();
    }
  }
  bool is_replicated(const NodeImpl& node) const {
    return std::ranges::any_of(sharded_.all(), [&](const Node& each) {
      return registry::applied_api(*each) == "replicate" && is_within(node, *each);
    });
  }
  int last_node() const { return sharded_.root()->nodes.back()->number; }

  void expect_gradients() {
    // Sums run in another order; norm layers, and sums whose terms cancel, magnify the difference.
    constexpr double kTolerance = 1e-3;
    test::expect_gradients_of(*unsharded_.root(), *sharded_.root(), mesh_, 1, kTolerance);
    for (std::size_t i = 0; i < sharded_.all().size(); ++i) {
      if (registry::applied_api(*sharded_.all()[i]) != "replicate") continue;
      const auto found = sharded_.all()[i]->named_parameters();
      for (const auto& expected : unsharded_.all()[i]->named_parameters()) {
        const at::Tensor& gradient = found[expected.key()].grad();
        ASSERT_EQ(gradient.defined(), expected.value().grad().defined()) << expected.key();
        if (!gradient.defined()) continue;
        EXPECT_TRUE(
            torch::allclose(gradient, expected.value().grad(), kTolerance, kTolerance / 100))
            << expected.key() << gradient << expected.value().grad();
      }
    }
    EXPECT_FALSE(is_in_pass(*sharded_.root()));
    for (const FlatParameterInfo& info : handles(*sharded_.root())) {
      EXPECT_FALSE(info.is_unsharded) << info.module_fqn;
    }
  }

  void expect_parameters() const {
    // Each step adds the tolerance of a gradient, which may be larger than the parameter.
    constexpr double kTolerance = 1e-3;
    const StateDict found = state_dict(*sharded_.root());
    for (const auto& expected : unsharded_.root()->named_parameters()) {
      const at::Tensor value = expected.value().detach();
      const at::Tensor whole = found.tensor(expected.key());
      const double scale = 1 + value.abs().max().item<double>();
      EXPECT_TRUE(torch::allclose(whole, value, 0, kTolerance * scale)) << expected.key() << "\n"
                                                                        << whole << "\n"
                                                                        << value;
    }
  }

  const dist::Mesh& mesh_;
  Drawn drawn_;
  ModelDraw unsharded_;
  ModelDraw sharded_;
};

struct World {
  int num_ranks;
  int num_cases;
  bool is_hybrid = false;
};

void PrintTo(const World& world, std::ostream* out) {
  *out << world.num_ranks << (world.is_hybrid ? " ranks, hybrid" : " ranks");
}

class RandomModelsTest : public ::testing::TestWithParam<World> {};

// Shows B1, B10.
TEST_P(RandomModelsTest, TrainAsTheUnshardedModel) {
  const char* const chosen = std::getenv("TESSERA_RANDOM_MODELS");
  const char* const one = std::getenv("TESSERA_RANDOM_MODEL");
  const int num_cases = one != nullptr      ? 1
                        : chosen != nullptr ? std::atoi(chosen)
                                            : GetParam().num_cases;
  constexpr int kNumCasesTogether = 50;  // they share connections, and one time limit
  test::Random random;
  const int num_ranks = GetParam().num_ranks;
  dist::MeshOptions options;
  if (GetParam().is_hybrid) options.axes = {{"replicate", 2}, {"shard", -1}};
  for (int done = 0; done < num_cases; done += kNumCasesTogether) {
    const auto drawn = static_cast<std::uint64_t>(random.between(0, std::int64_t{1} << 40));
    const std::uint64_t first = one == nullptr ? drawn : std::strtoull(one, nullptr, 0);
    const int num_together = std::min(kNumCasesTogether, num_cases - done);
    test::on_ranks(
        num_ranks,
        [&](const dist::Mesh& mesh) {
          for (int i = 0; i < num_together; ++i) {
            const std::uint64_t seed = first + static_cast<std::uint64_t>(i) * 1009;
            const std::string name = "the model of seed " + std::to_string(seed);
            test::stand_at(name);
            SCOPED_TRACE(name);
            try {
              Case(seed, mesh).run();
            } catch (const std::exception& error) {
              ADD_FAILURE() << "rank " << mesh.rank() << ": " << error.what();
              return;
            }
            if (HasFailure()) return;
          }
        },
        options);
    if (HasFailure()) return;
  }
}

std::string name_of_world(const ::testing::TestParamInfo<World>& info) {
  return std::to_string(info.param.num_ranks) + (info.param.is_hybrid ? "_hybrid" : "");
}

INSTANTIATE_TEST_SUITE_P(Worlds, RandomModelsTest,
                         ::testing::Values(World{1, 200}, World{2, 200}, World{3, 75},
                                           World{4, 200}, World{4, 25, true}),
                         name_of_world);
INSTANTIATE_TEST_SUITE_P(SlowWorlds, RandomModelsTest,
                         ::testing::Values(World{1, 500}, World{2, 500}, World{3, 250},
                                           World{4, 500}, World{4, 250, true}),
                         name_of_world);

}  // namespace
}  // namespace tessera
