#include <gmock/gmock.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "recipe/name_template.h"
#include "support/copy_checkpoint.h"
#include "support/error_matchers.h"
#include "support/fixtures.h"
#include "support/memory_checkpoint.h"
#include "support/reading.h"
#include "support/temporary_directory.h"
#include "tessera/formats/create.h"
#include "tessera/formats/detect.h"
#include "tessera/recipe/recipe.h"

// Tests the recipes in recipes/ with small models that have the names of the frameworks.

namespace tessera::recipe {
namespace {

using test::bytes_of;
using test::floats;
using test::MemoryCheckpoint;
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

Recipe shipped(const std::string& name) {
  return Recipe::read(FileSystem::posix(), test::fixture("../recipes/" + name + ".json"));
}

/// A model with Adam's state: float32 parameters have moments and a step.
class Model {
 public:
  void add(const std::string& name, const Shape& shape, DType dtype = DType::float32) {
    std::vector<float> values(static_cast<std::size_t>(numel_of(shape)));
    std::iota(values.begin(), values.end(), first_);
    first_ += 1000;
    if (dtype != DType::float32) {
      source_.add({name, dtype, shape}, test::Bytes(values.size() * itemsize(dtype)));
      return;
    }
    source_.add({name, dtype, shape}, bytes_of(values));
    source_.add({"optim.state." + name + ".exp_avg", dtype, shape}, bytes_of(values));
    source_.add({"optim.state." + name + ".step", dtype, {}}, bytes_of<float>({7}));
  }
  /// Adds a parameter of each layer.
  void add_layers(int num_layers, const std::string& name, const Shape& shape) {
    for (int layer = 0; layer < num_layers; ++layer) {
      add("model.layers." + std::to_string(layer) + "." + name, shape);
    }
  }
  const MemoryCheckpoint& source() const { return source_; }

 private:
  MemoryCheckpoint source_;
  float first_ = 0;
};

/// Names and shapes, without optimizer state.
std::vector<std::string> names_of(const formats::CheckpointContents& contents) {
  std::vector<std::string> names;
  for (const formats::TensorEntry& tensor : contents.tensors) {
    if (tensor.meta.fqn.starts_with("optim.")) continue;
    names.push_back(tensor.meta.fqn + " " + shape_to_string(tensor.meta.shape));
  }
  return names;
}

std::vector<std::string> problems_of(const RecipeReport& report) {
  std::vector<std::string> problems;
  for (const formats::Finding& wrong : report.problems) {
    problems.push_back(wrong.where.fqn + ": " + wrong.rule + ": " + wrong.expected + ", found " +
                       wrong.found);
  }
  return problems;
}

/// Checks a recipe and its inverse, applies both, and compares all elements with the source.
/// Returns the names that the recipe makes.
std::vector<std::string> proved(const Recipe& recipe, const MemoryCheckpoint& source,
                                RecipeOptions options) {
  const RecipeReport there = check_recipe(recipe, source.contents(), options);
  EXPECT_THAT(problems_of(there), IsEmpty());
  EXPECT_TRUE(there.is_invertible);
  auto moved = open_transformed(std::make_unique<MemoryCheckpoint>(source), recipe, options);
  options.direction = Direction::inverse;
  const RecipeReport back = check_recipe(recipe, there.targets, options);
  EXPECT_THAT(problems_of(back), IsEmpty());
  EXPECT_TRUE(back.is_invertible);
  const auto again = open_transformed(std::move(moved), recipe, options);
  std::size_t found = 0;
  for (std::size_t i = 0; i < again->contents().tensors.size(); ++i) {
    const TensorMeta& meta = again->contents().tensors[i].meta;
    const auto* expected = source.contents().find_tensor(meta.fqn);
    EXPECT_NE(expected, nullptr) << meta.fqn;
    if (expected == nullptr) continue;
    const auto index = static_cast<std::size_t>(expected - source.contents().tensors.data());
    EXPECT_EQ(test::whole_tensor(*again, i), test::whole_tensor(source, index)) << meta.fqn;
    ++found;
  }
  EXPECT_EQ(found + there.dropped.size(), source.contents().tensors.size());
  return names_of(there.targets);
}

/// Moves a model to Megatron's torch_dist and back by one recipe, and compares weights and moments.
void expect_back_from_torch_dist(const Recipe& recipe, const MemoryCheckpoint& source,
                                 RecipeOptions options) {
  FileSystem& fs = FileSystem::posix();
  const test::TemporaryDirectory tmp;
  const std::string path = tmp / "torch_dist";
  const auto moved = open_transformed(std::make_unique<MemoryCheckpoint>(source), recipe, options);
  const auto writer = formats::create_checkpoint(fs, path, moved->contents(), {},
                                                 {.format = formats::Format("megatron")});
  test::copy_checkpoint(*moved, *writer);
  options.direction = Direction::inverse;
  auto stacked = formats::open_checkpoint(fs, path);
  EXPECT_THAT(problems_of(check_recipe(recipe, stacked->contents(), options)), IsEmpty());
  const auto back = open_transformed(std::move(stacked), recipe, options);
  std::map<std::string, test::Bytes> found;
  for (std::size_t i = 0; i < back->contents().tensors.size(); ++i) {
    found.emplace(back->contents().tensors[i].meta.fqn, test::whole_tensor(*back, i));
  }
  EXPECT_THAT(back->contents().values, IsEmpty());  // no _extra_state of Megatron
  const std::set<std::string> dropped = [&] {
    const auto names = check_recipe(recipe, source.contents(),
                                    {.variables = options.variables, .config = options.config})
                           .dropped;
    return std::set<std::string>(names.begin(), names.end());
  }();
  for (std::size_t i = 0; i < source.contents().tensors.size(); ++i) {
    const std::string& fqn = source.contents().tensors[i].meta.fqn;
    if (fqn.ends_with(".step") || dropped.contains(fqn)) continue;  // steps are in common.pt
    std::string name = fqn;
    if (fqn.ends_with(".exp_avg")) {
      const std::string_view parameter =
          std::string_view(fqn).substr(12, fqn.size() - 12 - std::string_view(".exp_avg").size());
      name = "optimizer.state.exp_avg." + std::string(parameter);
    } else {
      EXPECT_EQ(found["optimizer.state.param." + fqn], test::whole_tensor(source, i)) << fqn;
    }
    EXPECT_EQ(found[name], test::whole_tensor(source, i)) << name;
  }
}

constexpr int kLayers = 2;

/// A model without feed-forward layers: 2 heads of Q and 1 of K and V, each of 4 elements.
Model with_attention() {
  Model model;
  model.add("model.embed_tokens.weight", {5, 3});
  model.add("model.norm.weight", {3});
  model.add("lm_head.weight", {5, 3});
  model.add_layers(kLayers, "input_layernorm.weight", {3});
  model.add_layers(kLayers, "post_attention_layernorm.weight", {3});
  model.add_layers(kLayers, "self_attn.q_proj.weight", {8, 3});
  model.add_layers(kLayers, "self_attn.k_proj.weight", {4, 3});
  model.add_layers(kLayers, "self_attn.v_proj.weight", {4, 3});
  model.add_layers(kLayers, "self_attn.o_proj.weight", {3, 8});
  return model;
}

Value config_of_attention() {
  return Value::Dict{{"num_attention_heads", 2}, {"num_key_value_heads", 1}, {"head_dim", 4}};
}

void add_dense(Model& model) {
  model.add_layers(kLayers, "mlp.gate_proj.weight", {6, 3});
  model.add_layers(kLayers, "mlp.up_proj.weight", {6, 3});
  model.add_layers(kLayers, "mlp.down_proj.weight", {3, 6});
}

void add_experts(Model& model, const std::string& gate, const std::string& up,
                 const std::string& down) {
  for (const char* expert : {"0", "1", "2"}) {
    const auto named = [&](const std::string& name) {
      return name.substr(0, name.find('*')) + expert + name.substr(name.find('*') + 1);
    };
    model.add_layers(kLayers, named(gate), {2, 3});
    model.add_layers(kLayers, named(up), {2, 3});
    model.add_layers(kLayers, named(down), {3, 2});
  }
}

TEST(ShippedRecipesTest, HuggingFaceToMegatronLlama) {
  Model model = with_attention();
  add_dense(model);
  const auto names =
      proved(shipped("hf-to-megatron-llama"), model.source(), {.config = config_of_attention()});
  expect_back_from_torch_dist(shipped("hf-to-megatron-llama"), model.source(),
                              {.config = config_of_attention()});
  EXPECT_THAT(names, Contains("decoder.layers.1.self_attention.linear_qkv.weight [16, 3]"));
  EXPECT_THAT(names, Contains("decoder.layers.0.mlp.linear_fc1.weight [12, 3]"));
}

TEST(ShippedRecipesTest, HuggingFaceToMetaLlama) {
  Model model = with_attention();
  add_dense(model);
  const Recipe recipe = shipped("hf-to-meta-llama");
  const RecipeOptions options{.config = config_of_attention()};
  const auto names = proved(recipe, model.source(), options);
  EXPECT_THAT(
      names, ElementsAre(
                 "layers.0.attention.wk.weight [4, 3]", "layers.0.attention.wo.weight [3, 8]",
                 "layers.0.attention.wq.weight [8, 3]", "layers.0.attention.wv.weight [4, 3]",
                 "layers.0.attention_norm.weight [3]", "layers.0.feed_forward.w1.weight [6, 3]",
                 "layers.0.feed_forward.w2.weight [3, 6]", "layers.0.feed_forward.w3.weight [6, 3]",
                 "layers.0.ffn_norm.weight [3]", "layers.1.attention.wk.weight [4, 3]",
                 "layers.1.attention.wo.weight [3, 8]", "layers.1.attention.wq.weight [8, 3]",
                 "layers.1.attention.wv.weight [4, 3]", "layers.1.attention_norm.weight [3]",
                 "layers.1.feed_forward.w1.weight [6, 3]", "layers.1.feed_forward.w2.weight [3, 6]",
                 "layers.1.feed_forward.w3.weight [6, 3]", "layers.1.ffn_norm.weight [3]",
                 "norm.weight [3]", "output.weight [5, 3]", "tok_embeddings.weight [5, 3]"));
  // In each head, rows 0 and 2, which Hugging Face rotates as a pair, get next to each other.
  const auto moved =
      open_transformed(std::make_unique<MemoryCheckpoint>(model.source()), recipe, options);
  for (const char* state : {"", ".exp_avg"}) {
    const std::string front = *state == 0 ? "" : "optim.state.";
    const auto rows =
        floats(model.source(), front + "model.layers.1.self_attn.q_proj.weight" + state);
    std::vector<float> expected;
    for (const std::size_t row : {0U, 2U, 1U, 3U, 4U, 6U, 5U, 7U}) {
      for (std::size_t column = 0; column < 3; ++column) expected.push_back(rows[row * 3 + column]);
    }
    EXPECT_EQ(floats(*moved, front + "layers.1.attention.wq.weight" + state), expected);
  }
}

TEST(ShippedRecipesTest, TorchtitanHasTheTensorsOfMetaUnderOtherNames) {
  Model model = with_attention();
  add_dense(model);
  const RecipeOptions options{.config = config_of_attention()};
  const auto moved_by = [&](const char* recipe) {
    return open_transformed(std::make_unique<MemoryCheckpoint>(model.source()), shipped(recipe),
                            options);
  };
  const auto meta = moved_by("hf-to-meta-llama");
  const auto titan = moved_by("hf-to-torchtitan-llama");
  proved(shipped("hf-to-torchtitan-llama"), model.source(), options);
  const std::map<std::string, std::string> others{
      {"output.weight", "lm_head.weight"},
      {"layers.1.attention.wq.weight", "layers.1.attention.qkv_linear.wq.weight"},
      {"layers.1.attention.wk.weight", "layers.1.attention.qkv_linear.wk.weight"},
      {"layers.1.attention.wv.weight", "layers.1.attention.qkv_linear.wv.weight"},
      {"layers.1.attention.wo.weight", "layers.1.attention.wo.weight"},
      {"layers.1.feed_forward.w3.weight", "layers.1.feed_forward.w3.weight"}};
  for (const auto& [name, other] : others) EXPECT_EQ(floats(*meta, name), floats(*titan, other));
  EXPECT_EQ(meta->contents().tensors.size(), titan->contents().tensors.size());
}

// Checkpoints of Megatron's older layout may have the names of TransformerEngine's layers.
TEST(ShippedRecipesTest, NamesOfTransformerEngineAreMegatronsToo) {
  Model model;
  model.add("model.decoder.layers.0.self_attention.linear_qkv.layer_norm_weight", {3});
  model.add("model.decoder.layers.0.mlp.experts.linear_fc2.weight1", {3, 2});
  MemoryCheckpoint source = model.source();
  source.add_value("model.decoder.layers.0.self_attention.linear_qkv._extra_state", Value());
  RecipeReport report = check_recipe(
      Recipe::parse(R"({"schema": 1, "megatron": "from", "rest": "keep", "rules": []})", "r.json"),
      source.contents(), {});
  EXPECT_THAT(problems_of(report), IsEmpty());
  EXPECT_THAT(names_of(report.targets),
              ElementsAre("model.decoder.layers.0.input_layernorm.weight [3]",
                          "model.decoder.layers.0.mlp.experts.local_experts.1.linear_fc2.weight "
                          "[3, 2]"));
  EXPECT_THAT(report.dropped,
              ElementsAre("model.decoder.layers.0.self_attention.linear_qkv._extra_state"));
  // Without `"megatron": "from"` in the recipe, these names have no special meaning.
  report = check_recipe(Recipe::parse(R"({"schema": 1, "rest": "keep", "rules": []})", "r.json"),
                        source.contents(), {});
  EXPECT_THAT(names_of(report.targets), testing::SizeIs(2));
  EXPECT_THAT(report.dropped, IsEmpty());
}

// Megatron writes one _extra_state object for each linear layer of each layer and expert.
TEST(ShippedRecipesTest, ManyObjectsOfMegatronsAreLeftOut) {
  formats::CheckpointContents contents;
  contents.tensors.push_back(
      {.meta = {"decoder.layers.mlp.router.weight", DType::float32, {60, 2}}});
  for (int layer = 0; layer < 60; ++layer) {
    for (int expert = 0; expert < 100; ++expert) {
      for (const char* linear : {"linear_fc1", "linear_fc2"}) {
        contents.values.push_back({std::string("decoder.layers.mlp.experts.experts.") + linear +
                                   "._extra_state/shard_" + std::to_string(layer) + "." +
                                   std::to_string(expert) + "_60.100"});
      }
    }
  }
  std::ranges::sort(contents.values, {}, &formats::ValueEntry::name);
  const RecipeReport report = check_recipe(
      Recipe::parse(R"({"schema": 1, "megatron": "from", "rest": "keep", "rules": []})", "r.json"),
      contents, {});
  EXPECT_THAT(problems_of(report), IsEmpty());
  EXPECT_EQ(report.dropped.size(), contents.values.size());
  EXPECT_EQ(report.targets.tensors.size(), 60U);
}

Recipe of_megatron() {
  return Recipe::parse(R"({"schema": 1, "megatron": "from", "rest": "keep", "rules": []})",
                       "r.json");
}

TEST(ShippedRecipesTest, NamesTooLongForARuleOfMegatronsAreRefused) {
  const std::string text(3000, 'x');
  for (const std::string& name : {"decoder.layers." + text, text + "._extra_state"}) {
    MemoryCheckpoint source("model");
    source.add({name, DType::float32, {1, 2}}, bytes_of<float>({1, 1}));
    const std::string expected = "Megatron's names: expected a name of 1 to 2048 bytes, found ";
    EXPECT_THAT([&] { check_recipe(of_megatron(), source.contents(), {}); },
                test::ThrowsError(ErrorKind::unsupported, expected));
    const auto open = [&] {
      open_transformed(std::make_unique<MemoryCheckpoint>(source), of_megatron(), {});
    };
    EXPECT_THAT(open, test::ThrowsError(ErrorKind::unsupported, expected));
    const std::string names = "model: " + name.substr(0, 20);  // file and tensor
    EXPECT_THAT(open, test::ThrowsError(ErrorKind::unsupported, names));
  }
  // The name has the largest size. It becomes too long when captures replace its numbers.
  formats::CheckpointContents contents;
  std::string name = "_extra_state";
  for (int i = 0; i < 9; ++i) name.insert(0, "1.");
  name.insert(0, std::string(NameTemplate::kMaxNameNbytes - name.size() - 1, 'x') + ".");
  contents.values.push_back({name});
  EXPECT_THAT(check_recipe(of_megatron(), contents, {}).dropped, ElementsAre(name));
}

// Captures match neither 01 nor numbers of more than 18 digits.
TEST(ShippedRecipesTest, DigitsThatAreNoNumberOfARuleStayInMegatronsNames) {
  MemoryCheckpoint source;
  for (const char* name : {"a.01.b._extra_state", "a.12345678901234567890.b._extra_state",
                           "a.1.b._extra_state", "a.2.b._extra_state"}) {
    source.add({name, DType::float32, {1}}, bytes_of<float>({1}));
  }
  const RecipeReport report = check_recipe(of_megatron(), source.contents(), {});
  EXPECT_THAT(problems_of(report), IsEmpty());
  EXPECT_EQ(report.dropped.size(), 4U);
}

TEST(ShippedRecipesTest, ATensorWithTooFewDimensionsIsNotUnstacked) {
  MemoryCheckpoint source;
  source.add({"decoder.layers.foo", DType::float32, {}}, bytes_of<float>({1}));
  source.add({"decoder.layers.mlp.experts.experts.bar", DType::float32, {1}}, bytes_of<float>({1}));
  source.add({"decoder.layers.w", DType::float32, {1}}, bytes_of<float>({1}));
  const RecipeReport report = check_recipe(of_megatron(), source.contents(), {});
  EXPECT_THAT(problems_of(report), IsEmpty());
  EXPECT_THAT(names_of(report.targets),
              ElementsAre("decoder.layers.0.w []", "decoder.layers.foo []",
                          "decoder.layers.mlp.experts.experts.bar [1]"));
}

// Problems do not number the rules that Tessera adds itself: the recipe does not contain them.
TEST(ShippedRecipesTest, ProblemsWithMegatronsNamesNameNoRule) {
  MemoryCheckpoint source;
  source.add({"decoder.layers.pre_mlp_layernorm.weight", DType::float32, {1, 2}},
             bytes_of<float>({1, 1}));
  source.add({"decoder.layers.mlp.linear_fc1.layer_norm_weight", DType::float32, {1, 3}},
             bytes_of<float>({1, 1, 1}));
  const RecipeReport report = check_recipe(of_megatron(), source.contents(), {});
  EXPECT_THAT(problems_of(report), Contains(HasSubstr("Megatron's names, merge_equal: ")));
  EXPECT_THAT(report.rules, IsEmpty());
}

// Tessera writes some norms under two names. If their elements differ, the move is refused.
TEST(ShippedRecipesTest, TwoTensorsOfOneNormMustBeEqual) {
  for (const float second : {1.F, 2.F}) {
    MemoryCheckpoint source;
    source.add({"decoder.layers.pre_mlp_layernorm.weight", DType::float32, {1, 2}},
               bytes_of<float>({1, 1}));
    source.add({"decoder.layers.mlp.linear_fc1.layer_norm_weight", DType::float32, {1, 2}},
               bytes_of<float>({1, second}));
    const Recipe recipe = Recipe::parse(
        R"({"schema": 1, "megatron": "from", "rest": "keep", "rules": []})", "r.json");
    const auto reader =
        open_transformed(std::make_unique<MemoryCheckpoint>(std::move(source)), recipe, {});
    const std::string name = "decoder.layers.0.pre_mlp_layernorm.weight";
    if (second == 1.F) {
      EXPECT_EQ(floats(*reader, name), std::vector<float>({1, 1}));
    } else {
      EXPECT_THAT(
          [&] { floats(*reader, name); },
          test::ThrowsError(ErrorKind::mismatch,
                            name + ": Megatron's names: expected equal elements in the tensors"));
    }
  }
}

TEST(ShippedRecipesTest, HuggingFaceToMegatronQwen3Moe) {
  Model model = with_attention();
  model.add_layers(kLayers, "self_attn.q_norm.weight", {4});
  model.add_layers(kLayers, "self_attn.k_norm.weight", {4});
  model.add_layers(kLayers, "mlp.gate.weight", {3, 3});
  add_experts(model, "mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight",
              "mlp.experts.*.down_proj.weight");
  const auto names = proved(shipped("hf-to-megatron-qwen3-moe"), model.source(),
                            {.config = config_of_attention()});
  expect_back_from_torch_dist(shipped("hf-to-megatron-qwen3-moe"), model.source(),
                              {.config = config_of_attention()});
  EXPECT_THAT(names,
              Contains("decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight [4, 3]"));
}

TEST(ShippedRecipesTest, HuggingFaceToMegatronMixtral) {
  Model model = with_attention();
  model.add_layers(kLayers, "block_sparse_moe.gate.weight", {3, 3});
  add_experts(model, "block_sparse_moe.experts.*.w1.weight", "block_sparse_moe.experts.*.w3.weight",
              "block_sparse_moe.experts.*.w2.weight");
  const auto names =
      proved(shipped("hf-to-megatron-mixtral"), model.source(), {.config = config_of_attention()});
  expect_back_from_torch_dist(shipped("hf-to-megatron-mixtral"), model.source(),
                              {.config = config_of_attention()});
  EXPECT_THAT(names, Contains("decoder.layers.1.mlp.router.weight [3, 3]"));
  EXPECT_THAT(names,
              Contains("decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight [4, 3]"));
  EXPECT_THAT(names,
              Contains("decoder.layers.1.mlp.experts.local_experts.2.linear_fc2.weight [3, 2]"));
}

/// One layer of DeepSeek-V3: 2 heads of 4 + 2 elements.
void add_latent_layer(Model& model, const std::string& layer, bool has_experts) {
  const std::string front = "model.layers." + layer + ".";
  model.add(front + "input_layernorm.weight", {3});
  model.add(front + "post_attention_layernorm.weight", {3});
  model.add(front + "self_attn.q_a_proj.weight", {5, 3});
  model.add(front + "self_attn.q_a_layernorm.weight", {5});
  model.add(front + "self_attn.q_b_proj.weight", {12, 5});
  model.add(front + "self_attn.kv_a_proj_with_mqa.weight", {6, 3});
  model.add(front + "self_attn.kv_a_layernorm.weight", {4});
  model.add(front + "self_attn.kv_b_proj.weight", {16, 4});
  model.add(front + "self_attn.o_proj.weight", {3, 8});
  std::vector<std::string> parts = {"mlp."};
  if (has_experts) {
    model.add(front + "mlp.gate.weight", {2, 3});
    model.add(front + "mlp.gate.e_score_correction_bias", {2});
    parts = {"mlp.shared_experts.", "mlp.experts.0.", "mlp.experts.1."};
  }
  for (const std::string& part : parts) {
    model.add(front + part + "gate_proj.weight", {2, 3});
    model.add(front + part + "up_proj.weight", {2, 3});
    model.add(front + part + "down_proj.weight", {3, 2});
  }
}

Model deepseek() {
  Model model;
  model.add("model.embed_tokens.weight", {5, 3});
  model.add("model.norm.weight", {3});
  model.add("lm_head.weight", {5, 3});
  add_latent_layer(model, "0", false);
  add_latent_layer(model, "1", true);
  return model;
}

TEST(ShippedRecipesTest, HuggingFaceToMegatronDeepSeek) {
  Model model = deepseek();
  add_latent_layer(model, "2", true);  // predicts one token more
  model.add("model.layers.2.enorm.weight", {3});
  model.add("model.layers.2.hnorm.weight", {3});
  model.add("model.layers.2.eh_proj.weight", {3, 6});
  model.add("model.layers.2.shared_head.norm.weight", {3});
  model.add("model.layers.2.shared_head.head.weight", {5, 3});
  model.add("model.layers.2.embed_tokens.weight", {5, 3});
  const Recipe recipe = shipped("hf-to-megatron-deepseek-v3");
  const RecipeOptions options{.config = Value::Dict{{"num_hidden_layers", 2}}};
  const auto names = proved(recipe, model.source(), options);
  expect_back_from_torch_dist(recipe, model.source(), options);
  for (const char* name : {
           "decoder.layers.0.mlp.linear_fc1.weight [4, 3]",
           "decoder.layers.1.mlp.experts.local_experts.1.linear_fc1.weight [4, 3]",
           "decoder.layers.1.mlp.experts.local_experts.1.linear_fc2.weight [3, 2]",
           "decoder.layers.1.mlp.router.expert_bias [2]",
           "decoder.layers.1.mlp.router.weight [2, 3]",
           "decoder.layers.1.mlp.shared_experts.linear_fc1.weight [4, 3]",
           "decoder.layers.1.pre_mlp_layernorm.weight [3]",
           "decoder.layers.1.self_attention.kv_layernorm.weight [4]",
           "decoder.layers.1.self_attention.linear_kv_down_proj.weight [6, 3]",
           "decoder.layers.1.self_attention.linear_kv_up_proj.weight [16, 4]",
           "decoder.layers.1.self_attention.linear_proj.weight [3, 8]",
           "decoder.layers.1.self_attention.linear_q_down_proj.weight [5, 3]",
           "decoder.layers.1.self_attention.linear_q_up_proj.weight [12, 5]",
           "decoder.layers.1.self_attention.q_layernorm.weight [5]",
           "mtp.layers.0.eh_proj.weight [3, 6]",
           "mtp.layers.0.enorm.weight [3]",
           "mtp.layers.0.final_layernorm.weight [3]",
           "mtp.layers.0.transformer_layer.mlp.shared_experts.linear_fc2.weight [3, 2]",
           "mtp.layers.0.transformer_layer.self_attention.linear_q_up_proj.weight [12, 5]",
       }) {
    EXPECT_THAT(names, Contains(name));
  }
  // Megatron has two of the tensors only once. Their copies are dropped, with moments and steps.
  EXPECT_EQ(check_recipe(recipe, model.source().contents(), options).dropped.size(), 6U);
}

// A part of 192 rows has two blocks of 128 rows, each with a scale; the second has only 64 rows.
TEST(ShippedRecipesTest, ScalesOfBlocksStayApart) {
  Model model = deepseek();
  for (const char* part : {"mlp.shared_experts.", "mlp.experts.2."}) {
    for (const char* side : {"gate", "up"}) {
      const std::string name = std::string("model.layers.1.") + part + side + "_proj.weight";
      if (std::string(part) != "mlp.shared_experts.") {
        model.add(name, {192, 3}, DType::float8_e4m3fn);
      }
      model.add(name + "_scale_inv", {2, 1});
    }
  }
  model.add("model.layers.1.mlp.experts.2.down_proj.weight", {3, 192}, DType::float8_e4m3fn);
  model.add("model.layers.1.mlp.experts.2.down_proj.weight_scale_inv", {1, 2});
  model.add("model.layers.1.self_attn.o_proj.weight_scale_inv", {1, 1});
  const auto names = proved(shipped("hf-to-megatron-deepseek-v3"), model.source(),
                            {.config = Value::Dict{{"num_hidden_layers", 2}}});
  const std::string expert = "decoder.layers.1.mlp.experts.local_experts.2.";
  EXPECT_THAT(names, Contains(expert + "linear_fc1.weight [384, 3]"));
  EXPECT_THAT(names, Contains(expert + "linear_fc1.weight_scale_inv.gate [2, 1]"));
  EXPECT_THAT(names, Contains(expert + "linear_fc1.weight_scale_inv.up [2, 1]"));
  EXPECT_THAT(names, Contains(expert + "linear_fc2.weight_scale_inv [1, 2]"));
  EXPECT_THAT(names,
              Contains("decoder.layers.1.self_attention.linear_proj.weight_scale_inv [1, 1]"));
}

TEST(ShippedRecipesTest, ExpertsOfTransformers4To5) {
  Model model = with_attention();
  model.add_layers(kLayers, "mlp.gate.weight", {3, 3});
  model.add_layers(kLayers, "mlp.shared_experts.gate_proj.weight", {2, 3});
  add_experts(model, "mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight",
              "mlp.experts.*.down_proj.weight");
  const Recipe recipe = shipped("transformers-v4-to-v5-experts");
  const auto names = proved(recipe, model.source(), {});
  EXPECT_THAT(names, Contains("model.layers.1.mlp.experts.gate_up_proj [3, 4, 3]"));
  EXPECT_THAT(names, Contains("model.layers.1.mlp.experts.down_proj [3, 3, 2]"));
  EXPECT_THAT(names, Contains("model.layers.1.mlp.shared_experts.gate_proj.weight [2, 3]"));
  EXPECT_THAT(names, Contains("model.embed_tokens.weight [5, 3]"));
}

TEST(ShippedRecipesTest, MixtralOfTransformers4To5) {
  Model model = with_attention();
  model.add_layers(kLayers, "block_sparse_moe.gate.weight", {3, 3});
  add_experts(model, "block_sparse_moe.experts.*.w1.weight", "block_sparse_moe.experts.*.w3.weight",
              "block_sparse_moe.experts.*.w2.weight");
  const auto names = proved(shipped("transformers-v4-to-v5-mixtral"), model.source(), {});
  EXPECT_THAT(names, Contains("model.layers.1.mlp.experts.gate_up_proj [3, 4, 3]"));
  EXPECT_THAT(names, Contains("model.layers.0.mlp.gate.weight [3, 3]"));
}

TEST(ShippedRecipesTest, WrappersAreRemoved) {
  Model model;
  model.add("_orig_mod.model.layers.0._checkpoint_wrapped_module.mlp.weight", {2, 3});
  model.add("model.layers.1._fsdp_wrapped_module.mlp.weight", {2, 3});
  model.add("module.head.weight", {2, 3});
  model.add("modules.0.weight", {2, 3});
  const auto report = check_recipe(shipped("remove-wrappers"), model.source().contents(), {});
  EXPECT_THAT(problems_of(report), IsEmpty());
  EXPECT_THAT(names_of(report.targets),
              ElementsAre("head.weight [2, 3]", "model.layers.0.mlp.weight [2, 3]",
                          "model.layers.1.mlp.weight [2, 3]", "modules.0.weight [2, 3]"));
  EXPECT_NE(report.targets.find_tensor("optim.state.model.layers.0.mlp.weight.exp_avg"), nullptr);
}

}  // namespace
}  // namespace tessera::recipe
