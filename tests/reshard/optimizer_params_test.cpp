#include "reshard/optimizer_params.h"

#include <gmock/gmock.h>

#include "reshard/params_search.h"
#include "support/error_matchers.h"
#include "support/memory_checkpoint.h"
#include "tessera/formats/merge.h"
#include "tessera/reshard/planner.h"

namespace tessera::reshard {
namespace {

using formats::CheckpointReader;
using formats::KeyPath;
using formats::NonStringKey;
using formats::StateKind;
using test::Bytes;
using test::MemoryCheckpoint;
using test::ThrowsError;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

const OptimizerParams kAuto{.names = std::string(kAutomaticParams), .path = {}};

OptimizerParams list(std::string json) {
  return {.names = std::move(json), .path = "names.json"};
}

Value::List numbers(std::vector<int> list) {
  Value::List values;
  for (const int number : list) values.emplace_back(number);
  return values;
}

/// A checkpoint in memory, filled as PyTorch would.
class Source {
 public:
  Source() : checkpoint_(std::make_unique<MemoryCheckpoint>("src")) {}

  Source& tensor(const std::string& name, Shape shape, DType dtype = DType::float32) {
    const auto nbytes = static_cast<std::size_t>(numel_of(shape)) * itemsize(dtype);
    checkpoint_->add({name, dtype, std::move(shape)}, Bytes(nbytes, next_byte()));
    order_.push_back(name);
    return *this;
  }
  /// Adds `exp_avg` and `step` for one number, with the keys that torch.save keeps.
  Source& state(int number, const Shape& shape, const std::string& root = "optim") {
    const std::string text = std::to_string(number);
    const auto add = [&](const std::string& entry, const Shape& of) {
      const auto nbytes = static_cast<std::size_t>(numel_of(of)) * 4;
      const std::string name = root + ".state." + text + "." + entry;
      auto& tensor = checkpoint_->add({name, DType::float32, of}, Bytes(nbytes, next_byte()));
      tensor.key_path = KeyPath{root, "state", NonStringKey{text}, entry};
      order_.push_back(name);
    };
    add("exp_avg", shape);
    add("step", {});
    return *this;
  }
  /// Adds pointwise state as FSDP1 keeps it: a vector, of which two ranks have a range each.
  Source& flat_state(int number, std::int64_t numel, std::int64_t of_rank_0) {
    Bytes bytes(static_cast<std::size_t>(numel) * 4, next_byte());
    checkpoint_->add(
        {"optim.state." + std::to_string(number) + ".exp_avg", DType::float32, {numel}}, bytes,
        {{FlatRange{0, of_rank_0}, 0}, {FlatRange{of_rank_0, numel}, 1}});
    return *this;
  }
  Source& value(const std::string& name, Value value) {
    checkpoint_->add_value(name, std::move(value));
    return *this;
  }
  Source& group(int group, std::vector<int> params, const std::string& root = "optim") {
    return value(root + ".param_groups." + std::to_string(group) + ".params",
                 numbers(std::move(params)));
  }
  Source& alias(const std::string& name, const std::string& target) {
    checkpoint_->add_alias(name, target);
    order_.push_back(name);
    return *this;
  }
  /// Makes the checkpoint keep the order in which its tensors were added.
  Source& with_order() {
    checkpoint_->dict_orders_for_change() = {order_};
    return *this;
  }
  MemoryCheckpoint& checkpoint() { return *checkpoint_; }
  std::unique_ptr<CheckpointReader> take() { return std::move(checkpoint_); }
  std::unique_ptr<CheckpointReader> named(const OptimizerParams& params,
                                          std::vector<std::string> only = {}) {
    return name_optimizer_params(std::move(checkpoint_), params, NameSelection(std::move(only)));
  }

 private:
  std::byte next_byte() { return std::byte{++last_byte_}; }

  std::unique_ptr<MemoryCheckpoint> checkpoint_;
  std::vector<std::string> order_;
  unsigned char last_byte_ = 0;
};

/// A model with a norm, as PyTorch orders it.
Source model_in_torch_order() {
  Source source;
  source.tensor("model.emb.weight", {5, 3})
      .tensor("model.norm.weight", {3})
      .tensor("model.norm.bias", {3})
      .tensor("model.norm.running_mean", {3})
      .tensor("model.norm.running_var", {3})
      .tensor("model.norm.num_batches_tracked", {}, DType::int64)
      .tensor("model.up.weight", {4, 3});
  return source;
}

/// The model with AdamW in two groups: weights of matrices decay, the norm does not.
Source two_groups() {
  Source source = model_in_torch_order();
  source.state(0, {5, 3}).state(1, {4, 3}).state(2, {3}).state(3, {3});
  source.group(0, {0, 1}).group(1, {2, 3});
  return source;
}

const char* const kNames = R"(["emb.weight", "up.weight", "norm.weight", "norm.bias"])";

std::vector<std::string> names_of(const CheckpointReader& reader) {
  std::vector<std::string> names;
  for (const auto& tensor : reader.contents().tensors) names.push_back(tensor.meta.fqn);
  return names;
}

Bytes bytes_of_tensor(const CheckpointReader& reader, const std::string& fqn) {
  const auto* tensor = reader.contents().find_tensor(fqn);
  EXPECT_NE(tensor, nullptr) << fqn;
  if (tensor == nullptr) return {};
  return test::whole_tensor(reader,
                            static_cast<std::size_t>(tensor - reader.contents().tensors.data()));
}

Value value_of(const CheckpointReader& reader, const std::string& name) {
  const auto& values = reader.contents().values;
  const auto found = std::ranges::find(values, name, &formats::ValueEntry::name);
  EXPECT_NE(found, values.end()) << name;
  return found == values.end()
             ? Value()
             : reader.read_value(static_cast<std::size_t>(found - values.begin()));
}

Value strings(std::vector<std::string> texts) {
  Value::List values;
  for (std::string& text : texts) values.emplace_back(std::move(text));
  return values;
}

// --- what changes when a number gets a name

TEST(OptimizerParamsTest, ANumberGetsTheNameAtItsPlaceInTheGroups) {
  Source source = two_groups();
  const Bytes of_up = bytes_of_tensor(source.checkpoint(), "optim.state.1.exp_avg");
  const Bytes of_bias = bytes_of_tensor(source.checkpoint(), "optim.state.3.exp_avg");
  const auto reader = source.named(list(kNames));
  EXPECT_EQ(bytes_of_tensor(*reader, "optim.state.up.weight.exp_avg"), of_up);
  EXPECT_EQ(bytes_of_tensor(*reader, "optim.state.norm.bias.exp_avg"), of_bias);
  EXPECT_THAT(names_of(*reader), Not(Contains(HasSubstr("state.1"))));
  EXPECT_TRUE(std::ranges::is_sorted(names_of(*reader)));
  EXPECT_EQ(value_of(*reader, "optim.param_groups.0.params"), strings({"emb.weight", "up.weight"}));
  EXPECT_EQ(value_of(*reader, "optim.param_groups.1.params"),
            strings({"norm.weight", "norm.bias"}));
}

TEST(OptimizerParamsTest, GroupsInOneValueAreNamedToo) {
  Source source = model_in_torch_order();
  source.state(0, {5, 3}).value("optim.param_groups",
                                Value::List{Value::Dict{{"lr", 0.1}, {"params", numbers({0})}}});
  const auto reader = source.named(list(R"(["emb.weight"])"));
  EXPECT_EQ(value_of(*reader, "optim.param_groups"),
            Value(Value::List{Value::Dict{{"lr", 0.1}, {"params", strings({"emb.weight"})}}}));
}

TEST(OptimizerParamsTest, AfterTheTenthGroupThereIsAnEleventh) {
  Source source;
  std::string json;
  for (int i = 0; i < 11; ++i) {
    source.tensor("model.w" + std::to_string(i), {2}).state(i, {2}).group(i, {i});
    json += (i == 0 ? "[\"w" : ", \"w") + std::to_string(i) + "\"";
  }
  const auto reader = source.named(list(json + "]"));
  EXPECT_EQ(value_of(*reader, "optim.param_groups.10.params"), strings({"w10"}));
  EXPECT_EQ(value_of(*reader, "optim.param_groups.2.params"), strings({"w2"}));
}

TEST(OptimizerParamsTest, TheKeyOfANumberBecomesAString) {
  const auto reader = two_groups().named(list(kNames));
  const auto* tensor = reader->contents().find_tensor("optim.state.emb.weight.exp_avg");
  ASSERT_NE(tensor, nullptr);
  EXPECT_EQ(tensor->key_path, (KeyPath{"optim", "state", "emb.weight", "exp_avg"}));
}

TEST(OptimizerParamsTest, NumbersThatAreTextAreNamedToo) {
  // The numbers are text in DCP, and in names without a key path.
  Source source = model_in_torch_order();
  source.tensor("optim.state.0.exp_avg", {5, 3}).tensor("optim.state.1.exp_avg", {4, 3});
  source.checkpoint().contents_for_change().tensors.back().key_path = {};
  for (auto& tensor : source.checkpoint().contents_for_change().tensors) {
    if (tensor.meta.fqn == "optim.state.0.exp_avg")
      tensor.key_path = KeyPath{"optim", "state", "0", "exp_avg"};
  }
  source.group(0, {0, 1});
  const auto reader = source.named(list(R"(["emb.weight", "up.weight"])"));
  const auto* nested = reader->contents().find_tensor("optim.state.emb.weight.exp_avg");
  const auto* flat = reader->contents().find_tensor("optim.state.up.weight.exp_avg");
  ASSERT_NE(nested, nullptr);
  ASSERT_NE(flat, nullptr);
  EXPECT_EQ(nested->key_path, (KeyPath{"optim", "state", "emb.weight", "exp_avg"}));
  EXPECT_THAT(flat->key_path, IsEmpty());
}

TEST(OptimizerParamsTest, APositionInAListIsNoNumber) {
  Source source = two_groups();
  source.tensor("optim.state.7.w", {2}, DType::int64);
  for (auto& tensor : source.checkpoint().contents_for_change().tensors) {
    if (tensor.meta.fqn == "optim.state.7.w")
      tensor.key_path = KeyPath{"optim", "state", std::int64_t{7}, "w"};
  }
  EXPECT_THAT(names_of(*source.named(list(kNames))), Contains("optim.state.7.w"));
}

TEST(OptimizerParamsTest, TheNameDecidesTheKindAndNotTheRecord) {
  Source source = two_groups();
  for (auto& tensor : source.checkpoint().contents_for_change().tensors) {
    if (tensor.meta.fqn.starts_with("optim.")) tensor.kind = StateKind::opaque;
  }
  const auto reader = source.named(list(kNames));
  const Plan plan = plan_reshard(reader->contents(), "src", {.world_size = 2, .strategy = "dim0"});
  ASSERT_THAT(plan.problems, IsEmpty());
  const auto* state = plan.destination.find_tensor("optim.state.up.weight.exp_avg");
  ASSERT_NE(state, nullptr);
  EXPECT_EQ(state->kind, StateKind::pointwise);
  EXPECT_EQ(state->parameter, "model.up.weight");
  EXPECT_EQ(state->pieces, plan.destination.find_tensor("model.up.weight")->pieces);
}

TEST(OptimizerParamsTest, ValuesAliasesSimplificationsAndLossesFollow) {
  Source source = two_groups();
  source.value("optim.state.1.rounds", 7);
  source.alias("optim.state.3.twin", "optim.state.1.exp_avg");
  auto& checkpoint = source.checkpoint();
  checkpoint.contents_for_change().simplifications = {
      {formats::Simplification::Kind::requires_grad, "optim.state.0.exp_avg"},
      {formats::Simplification::Kind::dict_class, "optim.state.2"},
      {formats::Simplification::Kind::dict_class, "model"}};
  const auto index_of = [](const CheckpointReader& reader, std::string_view fqn) {
    return static_cast<std::size_t>(reader.contents().find_tensor(fqn) -
                                    reader.contents().tensors.data());
  };
  checkpoint.missing_data_for_change().pieces[index_of(checkpoint, "optim.state.3.exp_avg")] = {
      {0, "lost.file"}};
  const auto reader = source.named(list(kNames));
  EXPECT_EQ(value_of(*reader, "optim.state.up.weight.rounds"), Value(7));
  ASSERT_THAT(reader->contents().aliases, SizeIs(1));
  EXPECT_EQ(reader->contents().aliases[0].fqn, "optim.state.norm.bias.twin");
  EXPECT_EQ(reader->contents().aliases[0].target, "optim.state.up.weight.exp_avg");
  EXPECT_EQ(reader->contents().simplifications[0].name, "optim.state.emb.weight.exp_avg");
  EXPECT_EQ(reader->contents().simplifications[1].name, "optim.state.norm.weight");
  EXPECT_EQ(reader->contents().simplifications[2].name, "model");
  const auto missing = reader->find_missing_data();
  ASSERT_THAT(missing.pieces, SizeIs(1));
  EXPECT_EQ(missing.pieces.begin()->first, index_of(*reader, "optim.state.norm.bias.exp_avg"));
}

TEST(OptimizerParamsTest, AnOptimizerWithoutStateGetsNamesInItsGroups) {
  Source source = model_in_torch_order();
  source.group(0, {0, 1, 2, 3});
  const auto reader = source.named(list(kNames));
  EXPECT_EQ(value_of(*reader, "optim.param_groups.0.params"),
            strings({"emb.weight", "up.weight", "norm.weight", "norm.bias"}));
}

// --- the choice of the optimizer

TEST(OptimizerParamsTest, WithoutNumbersThereIsNothingToDo) {
  Source source = model_in_torch_order();
  source.tensor("optim.state.emb.weight.exp_avg", {5, 3});
  source.value("optim.param_groups.0.params", strings({"emb.weight"}));
  EXPECT_THAT([&] { source.named(list(kNames)); },
              ThrowsError(ErrorKind::mismatch,
                          "expected an optimizer whose param_groups hold numbers, found none"));
}

TEST(OptimizerParamsTest, NumbersWithoutGroupsHaveNoOrder) {
  Source source = model_in_torch_order();
  source.state(0, {5, 3});
  EXPECT_THAT([&] { source.named(list(kNames)); },
              ThrowsError(ErrorKind::mismatch, "expected param_groups beside the state"));
}

TEST(OptimizerParamsTest, OneOfSeveralOptimizersIsSelected) {
  const auto make = [] {
    Source source = model_in_torch_order();
    source.state(0, {5, 3}, "optim_d").group(0, {0}, "optim_d");
    source.state(0, {4, 3}, "optim_g").group(0, {0}, "optim_g");
    return source;
  };
  EXPECT_THAT([&] { make().named(list(R"(["emb.weight"])")); },
              ThrowsError(ErrorKind::mismatch,
                          "expected one optimizer at a time, found 2: optim_d, optim_g"));
  const auto reader = make().named(list(R"(["emb.weight"])"), {"!optim_g"});
  EXPECT_THAT(names_of(*reader), Contains("optim_d.state.emb.weight.exp_avg"));
  EXPECT_THAT(names_of(*reader), Contains("optim_g.state.0.exp_avg"));
}

TEST(OptimizerParamsTest, AModuleThatIsCalledStateIsNoOptimizer) {
  Source source = two_groups();
  source.tensor("buffers.state.0.weight", {2}, DType::int64);
  EXPECT_THAT(names_of(*source.named(list(kNames))), Contains("buffers.state.0.weight"));
}

TEST(OptimizerParamsTest, StateAndGroupsMustHaveTheSameNumbers) {
  Source unknown = two_groups();
  unknown.state(4, {3});
  EXPECT_THAT([&] { unknown.named(list(kNames)); },
              ThrowsError(ErrorKind::mismatch,
                          "optim.state.4.exp_avg: numbers of optimizer state: expected one of the "
                          "4 numbers in optim.param_groups, 0 to 3, found 4"));
  Source twice = two_groups();
  twice.group(2, {1});
  EXPECT_THAT([&] { twice.named(list(kNames)); },
              ThrowsError(ErrorKind::mismatch,
                          "expected each number once, found 1 in group 0 and in group 2"));
  Source mixed = two_groups();
  mixed.value("optim.param_groups.2.params", strings({"emb.weight"}));
  EXPECT_THAT([&] { mixed.named(list(kNames)); },
              ThrowsError(ErrorKind::mismatch,
                          "optim.param_groups.2.params: numbers of optimizer state: expected "
                          "numbers of parameters, found 'emb.weight'"));
}

TEST(OptimizerParamsTest, StateUnderTheNameBesideTheNumberIsRefused) {
  Source source = two_groups();
  source.tensor("optim.state.emb.weight.exp_avg", {5, 3});
  EXPECT_THAT([&] { source.named(list(kNames)); },
              ThrowsError(ErrorKind::mismatch,
                          "optim.state.emb.weight.exp_avg: names of "
                          "parameters: expected state only under a number"));
}

// --- the user's list of names

TEST(OptimizerParamsTest, AListThatIsNoListOfNamesIsRefused) {
  const std::pair<const char*, const char*> cases[] = {
      {"{\"a\": 1}", "names.json: names of parameters: expected a list of names, found {'a': 1}"},
      {"[\"a\", 1]", "names.json: names of parameters: expected a name at position 1, found 1"},
      {"[\"\"]", "expected a name at position 0, found ''"},
      {"[", "names.json: JSON"},
      {"[[[[[]]]]]", "names.json: JSON"},
  };
  for (const auto& [json, text] : cases) {
    SCOPED_TRACE(json);
    EXPECT_THAT([&] { two_groups().named(list(json)); }, ThrowsError(ErrorKind::corruption, text));
  }
}

TEST(OptimizerParamsTest, AListOfAnotherLengthOrWithANameTwiceIsRefused) {
  EXPECT_THAT([&] { two_groups().named(list(R"(["emb.weight"])")); },
              ThrowsError(ErrorKind::mismatch,
                          "names.json: names of parameters: expected 4, as the groups of "
                          "'optim.param_groups' have (2 + 2), found 1"));
  EXPECT_THAT([&] { two_groups().named(list(R"(["a", "b", "c", "d", "e"])")); },
              ThrowsError(ErrorKind::mismatch, "found 5"));
  EXPECT_THAT(
      [&] { two_groups().named(list(R"(["a", "b", "c", "b"])")); },
      ThrowsError(ErrorKind::mismatch,
                  "names.json: b: names of parameters: expected each name once, found this name "
                  "at positions 1 and 3"));
}

TEST(OptimizerParamsTest, AParameterOfAnotherShapeIsRefused) {
  EXPECT_THAT(
      [&] {
        two_groups().named(list(R"(["up.weight", "emb.weight", "norm.weight", "norm.bias"])"));
      },
      ThrowsError(
          ErrorKind::mismatch,
          "names.json: up.weight: names of parameters: expected a parameter of shape [5, 3] "
          "for number 0, because its exp_avg has this shape, found a parameter of shape [4, 3]"));
}

TEST(OptimizerParamsTest, AParameterThatStateOfAdafactorDoesNotFitIsRefused) {
  const auto named = [](const std::string& entry, const Shape& state, const std::string& name) {
    auto checkpoint = std::make_unique<MemoryCheckpoint>("src");
    const auto add = [&](const std::string& fqn, const Shape& shape) -> auto& {
      return checkpoint->add({fqn, DType::uint8, shape},
                             Bytes(static_cast<std::size_t>(numel_of(shape))));
    };
    for (const auto& [fqn, shape] : std::vector<std::pair<std::string, Shape>>{
             {"model.conv", {2, 3, 4}}, {"model.emb", {11, 4}}, {"model.norm", {4}}}) {
      checkpoint->add({fqn, DType::float32, shape},
                      Bytes(static_cast<std::size_t>(numel_of(shape)) * 4));
    }
    add("optim.state.0." + entry, state).key_path =
        KeyPath{"optim", "state", NonStringKey{"0"}, entry};
    checkpoint->add_value("optim.param_groups.0.params", numbers({0}));
    return name_optimizer_params(std::move(checkpoint), list("[\"" + name + "\"]"), {});
  };
  const std::vector<std::tuple<std::string, Shape, std::string>> fitting = {
      {"row_var", {11, 1}, "emb"},        {"col_var", {1, 4}, "emb"},
      {"variance", {4}, "norm"},          {"exp_avg_sq_row", {11}, "emb"},
      {"exp_avg_sq_col", {4}, "emb"},     {"row_var", {2, 3, 1}, "conv"},
      {"col_var", {2, 1, 4}, "conv"},     {"exp_avg_sq_row", {2, 3}, "conv"},
      {"exp_avg_sq_col", {2, 4}, "conv"},
  };
  for (const auto& [entry, state, name] : fitting) {
    EXPECT_NO_THROW(named(entry, state, name)) << entry << ' ' << name;
  }
  for (const auto& [entry, state, name] : fitting) {
    const std::string other = name == "emb" ? "norm" : "emb";
    SCOPED_TRACE(entry + ' ' + other);
    const auto name_other = [&, &entry = entry, &state = state] { named(entry, state, other); };
    EXPECT_THAT(name_other,
                ThrowsError(ErrorKind::mismatch,
                            "a parameter that Adafactor's " + entry + ' ' + shape_to_string(state) +
                                " of number 0 fits, found a parameter of shape"));
  }
}

TEST(OptimizerParamsTest, ANameThatIsNoTensorIsRefusedWhereOthersAre) {
  EXPECT_THAT(
      [&] { two_groups().named(list(R"(["emb.weight", "up.weight", "norm.gain", "norm.bias"])")); },
      ThrowsError(ErrorKind::mismatch,
                  "names.json: norm.gain: names of parameters: expected a tensor of src, found "
                  "none of this name; 1 of 4 names are missing there"));
  EXPECT_THAT([&] { two_groups().named(list(R"(["a", "b", "c", "d"])")); },
              ThrowsError(ErrorKind::mismatch, "4 of 4 names are missing there"));
  // Only whole names match: `norm` and `up.weigh` are not found in `norm.weight`, `up.weight`.
  EXPECT_THAT(
      [&] {
        two_groups().named(list(R"(["emb.weight", "weight.x", "norm.weight", "norm.bias"])"));
      },
      ThrowsError(ErrorKind::mismatch, "weight.x"));
}

TEST(OptimizerParamsTest, ATiedParameterMayHaveAnyOfItsNames) {
  Source source = two_groups();
  source.alias("model.head.weight", "model.emb.weight");
  const auto reader =
      source.named(list(R"(["head.weight", "up.weight", "norm.weight", "norm.bias"])"));
  EXPECT_THAT(names_of(*reader), Contains("optim.state.head.weight.exp_avg"));
}

TEST(OptimizerParamsTest, AnOptimizerAloneIsNamedWithANote) {
  Source source;
  source.state(0, {5, 3}).group(0, {0});
  const auto reader = source.named(list(R"(["emb.weight"])"));
  EXPECT_THAT(names_of(*reader), Contains("optim.state.emb.weight.exp_avg"));
  ASSERT_THAT(reader->contents().opening_findings, SizeIs(1));
  EXPECT_THAT(reader->contents().opening_findings[0].found, HasSubstr("shapes are not checked"));
  EXPECT_THAT(two_groups().named(list(kNames))->contents().opening_findings, IsEmpty());
}

// Names from the checkpoint

TEST(OptimizerParamsTest, AutoFollowsTheOrderOfTheStateDictInEachGroup) {
  const auto reader = two_groups().with_order().named(kAuto);
  EXPECT_EQ(value_of(*reader, "optim.param_groups.0.params"), strings({"emb.weight", "up.weight"}));
  EXPECT_EQ(value_of(*reader, "optim.param_groups.1.params"),
            strings({"norm.weight", "norm.bias"}));
}

TEST(OptimizerParamsTest, FlatStateGetsTheShapeOfItsParameter) {
  for (const bool has_order : {true, false}) {
    SCOPED_TRACE(has_order);
    Source source;
    source.tensor("model.up.weight", {4, 3}).tensor("model.bias", {5});
    source.flat_state(0, 12, 7).flat_state(1, 5, 0).group(0, {0, 1});
    if (has_order) source.with_order();
    const auto reader = source.named({.names = "auto", .path = {}});
    const auto* state = reader->contents().find_tensor("optim.state.up.weight.exp_avg");
    ASSERT_NE(state, nullptr);
    EXPECT_EQ(state->meta.shape, (Shape{4, 3}));
    EXPECT_EQ(state->pieces[1], (formats::Piece{FlatRange{7, 12}, 1}));
    EXPECT_EQ(reader->contents().find_tensor("optim.state.bias.exp_avg")->meta.shape, (Shape{5}));
  }
}

TEST(OptimizerParamsTest, StateOfAFlatParameterOfSeveralIsRefused) {
  Source source;
  source.tensor("model.up.weight", {4, 3}).tensor("model.bias", {5});
  source.flat_state(0, 18, 9).group(0, {0});
  EXPECT_THAT([&] { source.named({.names = "auto", .path = {}}); },
              ThrowsError(ErrorKind::mismatch,
                          "optim.state.0: names of parameters: expected a tensor with the 18 "
                          "elements of this flat state, found none"));
}

TEST(OptimizerParamsTest, AutoTakesNamesThatTorchStored) {
  Source source = two_groups();  // param_names below override the order of the state dict
  source.value("optim.param_groups.0.param_names", strings({"emb.weight", "up.weight"}));
  source.value("optim.param_groups.1.param_names", strings({"norm.bias", "norm.weight"}));
  const auto reader = source.with_order().named(kAuto);
  EXPECT_EQ(value_of(*reader, "optim.param_groups.1.params"),
            strings({"norm.bias", "norm.weight"}));
}

TEST(OptimizerParamsTest, AutoWithoutAnOrderTakesOnlyWhatShapesDecide) {
  EXPECT_THAT(
      [&] { two_groups().named(kAuto); },
      ThrowsError(ErrorKind::mismatch,
                  "src: parameters of the optimizer: expected shapes that tell which "
                  "number is which parameter, found equal shapes: number 2 of shape [3], may be "
                  "model.norm.bias or model.norm.weight"));
  Source distinct;
  distinct.tensor("model.a", {2}).tensor("model.b", {3});
  distinct.state(0, {3}).state(1, {2}).group(0, {0, 1});
  EXPECT_EQ(value_of(*distinct.named(kAuto), "optim.param_groups.0.params"), strings({"b", "a"}));
}

TEST(OptimizerParamsTest, AnOrderThatIsThatOfNamesIsNone) {
  // If a program sorted the names, number 0 would get the name of the bias.
  const auto make = [](std::vector<std::string> names) {
    Source source;
    for (const std::string& name : names) source.tensor("model." + name, {3});
    source.state(0, {3}).state(1, {3}).group(0, {0, 1});
    return std::move(source.with_order());
  };
  EXPECT_THAT(
      [&] {
        make({"up.bias", "up.weight"}).named(kAuto);
      },
      ThrowsError(ErrorKind::mismatch, "found equal shapes: number 0"));
  EXPECT_THAT(
      [&] {
        make({"a.w", "a-b.w"}).named(kAuto);
      },
      ThrowsError(ErrorKind::mismatch, "found equal shapes: number 0"));
  EXPECT_EQ(value_of(*make({"up.weight", "up.bias"}).named(kAuto), "optim.param_groups.0.params"),
            strings({"up.weight", "up.bias"}));
}

TEST(OptimizerParamsTest, AutoNamesATiedParameterByItsFirstName) {
  Source source;
  source.tensor("model.wte.weight", {5, 3});
  source.alias("model.lm_head.weight", "model.wte.weight").tensor("model.a.weight", {5, 3});
  source.state(0, {5, 3}).state(1, {5, 3}).group(0, {0, 1});
  EXPECT_EQ(value_of(*source.with_order().named(kAuto), "optim.param_groups.0.params"),
            strings({"wte.weight", "a.weight"}));
}

TEST(OptimizerParamsTest, AutoTakesNoBuffersNoIntegersAndNoOtherOptimizers) {
  Source source = two_groups();  // running_mean and running_var have the shape of the norm's
  source.tensor("count", {3}, DType::int64).tensor("ema.state.w.exp_avg", {3});
  source.value("ema.param_groups.0.params", strings({"w"}));
  EXPECT_EQ(value_of(*source.with_order().named(kAuto), "optim.param_groups.1.params"),
            strings({"norm.weight", "norm.bias"}));
}

TEST(OptimizerParamsTest, AutoTakesNoCopiesOfParametersInTheDictOfAnOptimizer) {
  Source source;
  source.tensor("model.up.weight", {4, 3}).tensor("optim.fp32_groups.0", {4, 3});
  source.state(0, {4, 3}).group(0, {0});
  EXPECT_EQ(value_of(*source.named(kAuto), "optim.param_groups.0.params"), strings({"up.weight"}));
}

TEST(OptimizerParamsTest, ANoteSaysHowManyNamesOnlyTheOrderOfTheFileTells) {
  const auto reader = two_groups().with_order().named(kAuto);
  ASSERT_THAT(reader->contents().opening_findings, SizeIs(1));
  EXPECT_EQ(
      reader->contents().opening_findings[0].found,
      "several tensors for 2 numbers, such as number 2; the order of the file decides (give a "
      "list if the optimizer has another)");
  Source of_shapes;
  of_shapes.tensor("model.up", {4, 3}).tensor("model.down", {3, 4});
  of_shapes.state(0, {4, 3}).state(1, {3, 4}).group(0, {0, 1});
  EXPECT_THAT(of_shapes.with_order().named(kAuto)->contents().opening_findings, IsEmpty());
  Source of_names = two_groups();
  of_names.value("optim.param_groups.0.param_names", strings({"emb.weight", "up.weight"}));
  of_names.value("optim.param_groups.1.param_names", strings({"norm.weight", "norm.bias"}));
  EXPECT_THAT(of_names.with_order().named(kAuto)->contents().opening_findings, IsEmpty());
}

TEST(OptimizerParamsTest, AutoRefusesSeveralChoicesWithTheirNames) {
  Source source = two_groups();
  source.tensor("model.extra", {3});
  EXPECT_THAT([&] { source.with_order().named(kAuto); },
              ThrowsError(ErrorKind::mismatch,
                          "found equal shapes: number 2 of shape [3], may be model.norm.weight or "
                          "model.norm.bias"));
}

TEST(OptimizerParamsTest, AutoTakesWhatIsSelectedIfThatIsEnough) {
  const auto make = [] {
    Source source = two_groups();
    source.tensor("ema.norm.weight", {3}).tensor("ema.norm.bias", {3});
    return std::move(source.with_order());
  };
  EXPECT_THAT([&] { make().named(kAuto); }, ThrowsError(ErrorKind::mismatch, "found equal shapes"));
  EXPECT_THAT(names_of(*make().named(kAuto, {"!ema"})), Contains("optim.state.norm.bias.exp_avg"));
  EXPECT_THAT(names_of(*two_groups().with_order().named(kAuto, {"optim"})),
              Contains("optim.state.norm.bias.exp_avg"));
}

TEST(OptimizerParamsTest, AutoNamesAreRelativeToTheModel) {
  const std::tuple<const char*, const char*, const char*> cases[] = {
      {"model.", "optim", "b"},
      {"state_dict.", "optimizer_states.0", "b"},
      {"model_state_dict.", "optim", "b"},
      {"app.model.", "app.optim", "b"},
      {"", "optim", "b"},
      {"net.", "optim", "net.b"},
      {"state.", "optim", "state.b"},
      {"model.", "app.optim", "b"},
  };
  for (const auto& [prefix, root, expected] : cases) {
    SCOPED_TRACE(std::string(prefix) + ", " + root);
    Source source;
    source.tensor(std::string(prefix) + "b", {3}).tensor(std::string(prefix) + "a", {2});
    source.state(0, {3}, root).group(0, {0}, root);
    const auto reader = source.named(kAuto);
    EXPECT_EQ(value_of(*reader, std::string(root) + ".param_groups.0.params"), strings({expected}));
  }
}

TEST(OptimizerParamsTest, AMergeKeepsTheOrderOfEachFile) {
  Source of_model;
  of_model.tensor("up.weight", {3}).tensor("up.bias", {3}).with_order();
  Source of_optimizer;
  of_optimizer.tensor("state.0.exp_avg", {3}).tensor("state.1.exp_avg", {3}).with_order();
  of_optimizer.value("param_groups.0.params", numbers({0, 1}));
  std::vector<formats::MergeSource> sources;
  sources.push_back({of_model.take(), "model"});
  sources.push_back({of_optimizer.take(), "optim"});
  auto merged = formats::merge_checkpoints(std::move(sources), formats::MergePreference::none);
  const auto reader = name_optimizer_params(std::move(merged.reader), kAuto);
  EXPECT_EQ(value_of(*reader, "optim.param_groups.0.params"), strings({"up.weight", "up.bias"}));
}

TEST(OptimizerParamsTest, TwoFilesHaveNoCommonOrder) {
  const auto part = [](const char* name) {
    Source source;
    source.tensor(std::string(name) + ".weight", {3}).tensor(std::string(name) + ".bias", {3});
    return source.with_order().take();
  };
  Source of_optimizer;
  for (int i = 0; i < 4; ++i) {
    of_optimizer.tensor("optim.state." + std::to_string(i) + ".exp_avg", {3});
  }
  of_optimizer.group(0, {0, 1, 2, 3});
  std::vector<formats::MergeSource> sources;
  sources.push_back({part("b"), ""});
  sources.push_back({part("a"), ""});
  sources.push_back({of_optimizer.take(), ""});
  auto merged = formats::merge_checkpoints(std::move(sources), formats::MergePreference::none);
  EXPECT_THAT([&] { name_optimizer_params(std::move(merged.reader), kAuto); },
              ThrowsError(ErrorKind::mismatch, "found equal shapes: number 0"));
}

// State that is smaller than its parameter

/// GaLore of rank 2: the state of `up.weight` has the shape of the frozen weight.
Source low_rank(bool groups_are_one_value) {
  Source source;
  source.tensor("model.up.weight", {6, 4}).tensor("model.frozen.weight", {6, 2}).state(0, {6, 2});
  if (groups_are_one_value) {
    source.value("optim.param_groups",
                 Value::List{Value::Dict{{"rank", 2}, {"params", numbers({0})}}});
  } else {
    source.group(0, {0}).value("optim.param_groups.0.update_proj_gap", 200);
  }
  return source;
}

TEST(OptimizerParamsTest, AutoDoesNotTakeLowRankStateForThatOfAnotherTensor) {
  for (const bool groups_are_one_value : {true, false}) {
    SCOPED_TRACE(groups_are_one_value);
    EXPECT_THAT([&] { low_rank(groups_are_one_value).with_order().named(kAuto); },
                ThrowsError(ErrorKind::mismatch,
                            "number 0, which has no state that tells its shape (low-rank state "
                            "does not), may be model.up.weight or model.frozen.weight"));
    EXPECT_THAT([&] { low_rank(groups_are_one_value).named(kAuto); },
                ThrowsError(ErrorKind::mismatch, "found number 0, which has no state that tells"));
  }
}

TEST(OptimizerParamsTest, AutoTakesTheOnlyOrderOfLowRankState) {
  Source source;
  source.tensor("model.up.weight", {6, 4}).tensor("model.down.weight", {4, 6});
  source.tensor("model.bias", {4}).state(0, {6, 2}).state(1, {2, 6}).state(2, {4});
  source.group(0, {0, 1}).value("optim.param_groups.0.rank", 2).group(1, {2});
  const auto reader = source.with_order().named(kAuto);
  EXPECT_EQ(value_of(*reader, "optim.param_groups.0.params"),
            strings({"up.weight", "down.weight"}));
  EXPECT_EQ(value_of(*reader, "optim.param_groups.1.params"), strings({"bias"}));
}

TEST(OptimizerParamsTest, AutoDoesNotTrustStateOfSeveralShapes) {
  Source source;
  source.tensor("model.up.weight", {6, 4}).tensor("model.frozen.weight", {6, 2});
  source.state(0, {6, 4}).tensor("optim.state.0.exp_avg_sq", {6, 2}).group(0, {0});
  EXPECT_THAT([&] { source.named(kAuto); },
              ThrowsError(ErrorKind::mismatch, "found number 0, which has no state that tells"));
}

TEST(OptimizerParamsTest, LowRankStateMovesWholeUnderTheGivenName) {
  const auto reader = low_rank(false).named(list(R"(["up.weight"])"));
  const Plan plan = plan_reshard(reader->contents(), "src", {.world_size = 2, .strategy = "dim0"});
  ASSERT_THAT(plan.problems, IsEmpty());
  const auto* const state = plan.destination.find_tensor("optim.state.up.weight.exp_avg");
  ASSERT_NE(state, nullptr);
  EXPECT_EQ(state->kind, StateKind::opaque);
  ASSERT_THAT(plan.notes, SizeIs(1));
  EXPECT_EQ(plan.notes[0].where.fqn, "optim.state.up.weight.exp_avg");
  EXPECT_THAT(plan.notes[0].expected, HasSubstr("the shape of model.up.weight [6, 4]"));
}

TEST(OptimizerParamsTest, StateThatFitsNoNameOfTheListKeepsItsShape) {
  // Amos has one number for each parameter.
  Source amos;
  amos.tensor("model.up.weight", {6, 4}).tensor("model.bias", {6});
  amos.state(0, {}).state(1, {}).group(0, {0, 1});
  const auto reader = amos.named(list(R"(["up.weight", "bias"])"));
  const auto* const state = reader->contents().find_tensor("optim.state.bias.exp_avg");
  ASSERT_NE(state, nullptr);
  EXPECT_EQ(state->meta.shape, Shape());

  Source flat;
  flat.tensor("model.up.weight", {6, 4}).tensor("model.bias", {6});
  flat.tensor("model.down.weight", {4, 6});
  flat.flat_state(0, 24, 12).flat_state(1, 6, 3).group(0, {0, 1});
  const auto of_flat = flat.named(list(R"(["up.weight", "down.weight"])"));
  EXPECT_EQ(of_flat->contents().find_tensor("optim.state.up.weight.exp_avg")->meta.shape,
            (Shape{6, 4}));
  EXPECT_EQ(of_flat->contents().find_tensor("optim.state.down.weight.exp_avg")->meta.shape,
            (Shape{6}));
}

TEST(OptimizerParamsTest, StateOfAnotherModelIsRefused) {
  const auto make = [](const Shape& first, const Shape& second) {
    Source source;
    source.tensor("model.fc.weight", {4, 4}).tensor("model.fc.bias", {4});
    source.state(0, first).state(1, second).group(0, {0, 1});
    return source;
  };
  const auto named = [&](const Shape& first, const Shape& second, const char* names) {
    return [=] { make(first, second).named(list(names)); };
  };
  const char* const kInOrder = R"(["fc.weight", "fc.bias"])";
  const char* const kInAnother = R"(["fc.bias", "fc.weight"])";
  EXPECT_THAT(named({8, 8}, {8}, kInOrder),
              ThrowsError(ErrorKind::mismatch, "expected a parameter of shape [8, 8]"));
  EXPECT_THAT(named({8, 8}, {8}, kInAnother),
              ThrowsError(ErrorKind::mismatch, "expected a parameter of shape [8, 8]"));
  // One number fits, and the state of the other one is not smaller than its parameter.
  EXPECT_THAT(named({4, 5}, {4}, kInOrder),
              ThrowsError(ErrorKind::mismatch, "expected a parameter of shape [4, 5]"));
  EXPECT_THAT(named({2, 8}, {4}, kInOrder),
              ThrowsError(ErrorKind::mismatch, "expected a parameter of shape [2, 8]"));
  EXPECT_THAT(named({4, 4}, {1, 1}, kInOrder),
              ThrowsError(ErrorKind::mismatch, "expected a parameter of shape [1, 1]"));
  // The state is smaller, but no number fits.
  EXPECT_THAT(named({2, 2}, {2}, kInOrder),
              ThrowsError(ErrorKind::mismatch, "expected a parameter of shape [2, 2]"));
  EXPECT_NO_THROW(named({4, 2}, {4}, kInOrder)());
}

TEST(OptimizerParamsTest, OneNumberForAParameterOfOneElementIsNoMisfit) {
  Source source;
  source.tensor("model.fc.weight", {4, 4}).tensor("model.fc.bias", {1});
  source.state(0, {}).state(1, {}).group(0, {0, 1});
  EXPECT_NO_THROW(source.named(list(R"(["fc.weight", "fc.bias"])")));
}

TEST(OptimizerParamsTest, AWrongOrderIsRefusedAlsoBesideStateThatFitsNoName) {
  const auto make = [] {
    Source source = two_groups();
    source.tensor("model.low.weight", {7, 7}).state(4, {7, 2}).group(2, {4});
    return source;
  };
  EXPECT_THAT(
      [&] {
        make().named(
            list(R"(["up.weight", "emb.weight", "norm.weight", "norm.bias", "low.weight"])"));
      },
      ThrowsError(ErrorKind::mismatch, "expected a parameter of shape [5, 3] for number 0"));
  EXPECT_THAT(names_of(*make().named(list(
                  R"(["emb.weight", "up.weight", "norm.weight", "norm.bias", "low.weight"])"))),
              Contains("optim.state.low.weight.exp_avg"));
}

// --- the search for names

std::vector<NumberedParam> params(int first, std::vector<std::optional<Shape>> shapes) {
  std::vector<NumberedParam> group;
  for (auto& shape : shapes) group.push_back({std::to_string(first++), std::move(shape)});
  return group;
}

std::vector<ParamCandidate> candidates(std::vector<Shape> shapes) {
  std::vector<ParamCandidate> list;
  for (Shape& shape : shapes) list.push_back({std::string(1, "abcdefgh"[list.size() % 8]), shape});
  return list;
}

TEST(ParamsSearchTest, ANumberWithoutStateFitsAnything) {
  EXPECT_THAT(params_in_order({params(0, {Shape{2}, std::nullopt, Shape{4}})},
                              candidates({{2}, {3}, {4}}), "src"),
              ElementsAre(0, 1, 2));
  EXPECT_THAT(
      [] {
        params_in_order({params(0, {Shape{2}, std::nullopt})}, candidates({{2}, {3}, {4}}), "src");
      },
      ThrowsError(
          ErrorKind::mismatch,
          "number 1, which has no state that tells its shape (low-rank state does not), may "
          "be b or c"));
}

TEST(ParamsSearchTest, AnEmptyGroupTakesNothing) {
  EXPECT_THAT(params_in_order({{}, params(0, {Shape{2}})}, candidates({{2}}), "src"),
              ElementsAre(0));
}

TEST(ParamsSearchTest, TheFirstNumberThatFitsNothingIsNamed) {
  EXPECT_THAT(
      [] {
        params_in_order({params(0, {Shape{2}, Shape{9}})}, candidates({{2}, {3}}), "src");
      },
      ThrowsError(ErrorKind::mismatch,
                  "src: parameters of the optimizer: expected a tensor for each number, found none "
                  "for number 1 of shape [9]"));
  EXPECT_THAT(
      [] {
        params_in_order({params(0, {Shape{3}, Shape{2}})}, candidates({{2}, {3}}), "src");
      },
      ThrowsError(ErrorKind::mismatch, "in the order of the checkpoint, found none for number 1"));
  EXPECT_THAT(
      [] {
        params_in_order({params(0, {Shape{2}}), params(1, {Shape{2}})}, candidates({{2}, {3}}),
                        "src");
      },
      ThrowsError(ErrorKind::mismatch, "found none left for number 1 of shape [2]"));
  EXPECT_THAT(
      [] {
        params_in_order({params(0, {Shape{2}, Shape{2}})}, candidates({{2}}), "src");
      },
      ThrowsError(ErrorKind::mismatch, "expected 2 tensors that may be parameters, found 1"));
}

TEST(ParamsSearchTest, GroupsShareNoCandidate) {
  // Either group may have either matrix of [2, 2].
  EXPECT_THAT(
      [] {
        params_in_order({params(0, {Shape{2, 2}}), params(1, {Shape{2, 2}})},
                        candidates({{2, 2}, {2, 2}}), "src");
      },
      ThrowsError(ErrorKind::mismatch, "number 0 of shape [2, 2], may be a or b"));
  EXPECT_THAT(params_in_order({params(0, {Shape{2}, Shape{3}}), params(2, {Shape{2}})},
                              candidates({{2}, {3}, {2}}), "src"),
              ElementsAre(0, 1, 2));
}

TEST(ParamsSearchTest, AModelOfManyLayersInTwoGroupsIsFoundInTime) {
  constexpr int kNumLayers = 2000;
  std::vector<std::vector<NumberedParam>> groups(2);
  std::vector<Shape> shapes;
  for (int i = 0; i < kNumLayers; ++i) {
    groups[0].push_back({std::to_string(i), Shape{4, 4}});
    groups[1].push_back({std::to_string(i + kNumLayers), Shape{4}});
    shapes.push_back({4, 4});
    shapes.push_back({4});
  }
  const auto found = params_in_order(groups, candidates(shapes), "src");
  EXPECT_EQ(found[kNumLayers - 1], 2U * (kNumLayers - 1));
  EXPECT_EQ(found[kNumLayers], 1U);
}

TEST(ParamsSearchTest, TooManyChoicesAreRefusedInTime) {
  std::vector<std::vector<NumberedParam>> groups;
  std::vector<Shape> shapes;
  for (int i = 0; i < 40; ++i) {
    groups.push_back(params(i * 40, std::vector<std::optional<Shape>>(40, Shape{2})));
    for (int k = 0; k < 40; ++k) shapes.push_back({2});
  }
  EXPECT_THAT([&] { params_in_order(groups, candidates(shapes), "src"); },
              ThrowsError(ErrorKind::mismatch, "more than 200000 to look through"));
}

TEST(ParamsSearchTest, ShapesAloneNeedStateAndDistinctShapes) {
  EXPECT_THAT(
      params_by_shape({params(0, {Shape{3}, Shape{2}})}, candidates({{2}, {3}, {4}, {4}}), "src"),
      ElementsAre(1, 0));
  EXPECT_THAT([] { params_by_shape({params(0, {std::nullopt})}, candidates({{2}}), "src"); },
              ThrowsError(ErrorKind::mismatch, "found number 0, which has no state that tells"));
  EXPECT_THAT([] { params_by_shape({params(0, {Shape{2}})}, candidates({{3}}), "src"); },
              ThrowsError(ErrorKind::mismatch, "found none for number 0 of shape [2]"));
  EXPECT_THAT(
      [] {
        params_by_shape({params(0, {Shape{2}, Shape{2}})}, candidates({{2}, {3}}), "src");
      },
      ThrowsError(ErrorKind::mismatch, "found none for number 0 of shape [2]"));
}

// Entries of ranks

/// Two ranks: rank 1 has its own weight, and its own state of number 0.
Source two_ranks() {
  Source source;
  source.tensor("model.fc.bias", {3}).tensor("model.fc.weight", {3, 4});
  source.state(0, {3, 4}).state(1, {3}).group(0, {0, 1});
  source.tensor("per_rank.1.optim.state.0.step", {});
  for (auto& tensor : source.checkpoint().contents_for_change().tensors) {
    if (tensor.meta.fqn != "per_rank.1.optim.state.0.step") continue;
    tensor.key_path = KeyPath{"per_rank", "1", "optim", "state", NonStringKey{"0"}, "step"};
  }
  source.value("per_rank.1.optim.state.1.calls", Value(3));
  return source;
}

const char* const kFcNames = R"(["fc.weight", "fc.bias"])";

TEST(OptimizerParamsTest, StateOfARankGetsTheSameNameAndNumber) {
  Source source = two_ranks();
  auto named = source.named(list(kFcNames));
  EXPECT_THAT(names_of(*named), Contains("per_rank.1.optim.state.fc.weight.step"));
  EXPECT_THAT(names_of(*named), Not(Contains(HasSubstr("state.0"))));
  EXPECT_EQ(named->contents().values.back().name, "per_rank.1.optim.state.fc.bias.calls");
  const auto* const step = named->contents().find_tensor("per_rank.1.optim.state.fc.weight.step");
  ASSERT_NE(step, nullptr);
  EXPECT_EQ(KeyPath(step->key_path),
            (KeyPath{"per_rank", "1", "optim", "state", "fc.weight", "step"}));

  const auto numbered = name_optimizer_params(
      std::move(named), {.names = std::string(kParamsAsNumbers), .path = {}}, NameSelection());
  EXPECT_THAT(names_of(*numbered), Contains("per_rank.1.optim.state.0.step"));
  EXPECT_THAT(names_of(*numbered), Not(Contains(HasSubstr("state.fc"))));
  EXPECT_EQ(numbered->contents().values.back().name, "per_rank.1.optim.state.1.calls");
  const auto* const back = numbered->contents().find_tensor("per_rank.1.optim.state.0.step");
  ASSERT_NE(back, nullptr);
  EXPECT_EQ(KeyPath(back->key_path),
            (KeyPath{"per_rank", "1", "optim", "state", NonStringKey{"0"}, "step"}));
}

TEST(OptimizerParamsTest, StateThatOnlyARankHasDecidesTheShape) {
  Source source;
  source.tensor("model.bias", {3}).tensor("model.weight", {3, 4}).state(1, {3});
  source.tensor("per_rank.1.optim.state.0.exp_avg", {3, 4}).group(0, {0, 1});
  EXPECT_THAT(names_of(*source.named(kAuto)), Contains("per_rank.1.optim.state.weight.exp_avg"));
}

TEST(OptimizerParamsTest, StateOfARankIsComparedWithItsOwnParameter) {
  Source source = two_ranks();
  source.tensor("per_rank.1.model.fc.weight", {2, 4});
  source.tensor("per_rank.1.optim.state.0.exp_avg", {2, 4});
  EXPECT_THAT(names_of(*source.named(list(kFcNames))),
              Contains("per_rank.1.optim.state.fc.weight.exp_avg"));

  Source other = two_ranks();
  other.tensor("per_rank.1.optim.state.0.exp_avg", {2, 4});
  EXPECT_THAT([&] { other.named(list(kFcNames)); },
              ThrowsError(ErrorKind::mismatch, "found a parameter of shape [3, 4]"));
}

TEST(OptimizerParamsTest, ARankWithItsOwnListIsRefused) {
  const auto with_own_list = [] {
    Source source = two_ranks();
    source.value("per_rank.1.optim.param_groups.0.params", numbers({1, 0}));
    return source;
  };
  EXPECT_THAT(
      [&] {
        with_own_list().named(list(kFcNames), {"model*", "optim*"});
      },
      ThrowsError(ErrorKind::mismatch,
                  "per_rank.1.optim.param_groups.0.params: numbers of optimizer state: "
                  "expected the same parameters in the same order on all ranks"));
  EXPECT_THAT(names_of(*with_own_list().named(list(kFcNames), {"optim*", "!per_rank.*"})),
              Contains("optim.state.fc.weight.step"));
}

TEST(OptimizerParamsTest, FieldsOfEachParameterGiveNoNumbers) {
  Source source = model_in_torch_order();
  source.tensor("optimizer.state.up.weight.exp_avg", {4, 3});
  source.value("optimizer.param_groups.up.weight.lr", 0.1);
  EXPECT_THAT(
      [&] { source.named({.names = std::string(kParamsAsNumbers), .path = {}}); },
      ThrowsError(ErrorKind::unsupported,
                  "optimizer.param_groups.up.weight.lr: numbers for parameters: expected groups "
                  "that list the names of their parameters (params), found fields for each"));
}

}  // namespace
}  // namespace tessera::reshard
