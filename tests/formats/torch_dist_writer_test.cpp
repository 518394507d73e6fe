#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "formats/megatron/torch_dist_names.h"
#include "support/copy_checkpoint.h"
#include "support/error_matchers.h"
#include "support/fault_file_system.h"
#include "support/memory_checkpoint.h"
#include "support/reading.h"
#include "support/temporary_directory.h"
#include "tessera/base/error.h"
#include "tessera/formats/create.h"
#include "tessera/formats/detect.h"
#include "tessera/formats/format_writer.h"

namespace tessera::formats {
namespace {

using megatron::TorchDistNames;
using test::Bytes;
using test::bytes_of;
using test::FaultFileSystem;
using test::MemoryCheckpoint;
using test::ThrowsError;
using testing::ElementsAre;
namespace stdfs = std::filesystem;

TorchDistNames names_of(const std::vector<std::string>& weights) {
  std::map<std::string, TensorMeta> metas;
  for (const std::string& name : weights) metas[name] = {name, DType::float32, {4, 2}};
  return TorchDistNames(metas, "there");
}

std::vector<std::string> keys_of(const TorchDistNames& names, const std::string& weight) {
  std::vector<std::string> keys;
  for (const auto& place : names.places_of(weight)) keys.push_back(place.key);
  return keys;
}

TEST(TorchDistNamesTest, LayersThatAreAlikeAreStacked) {
  const auto names =
      names_of({"embedding.word_embeddings.weight", "decoder.layers.0.mlp.linear_fc1.weight",
                "decoder.layers.1.mlp.linear_fc1.weight"});
  EXPECT_TRUE(names.are_layers_stacked());
  const auto& place = names.places_of("decoder.layers.1.mlp.linear_fc1.weight").front();
  EXPECT_EQ(place.key, "decoder.layers.mlp.linear_fc1.weight");
  EXPECT_THAT(place.index, ElementsAre(1));
  EXPECT_EQ(place.shape_of({4, 2}), (Shape{2, 4, 2}));
  EXPECT_THAT(keys_of(names, "embedding.word_embeddings.weight"),
              ElementsAre("embedding.word_embeddings.weight"));
  EXPECT_THAT(names.extra_states(),
              ElementsAre("decoder.layers.mlp.linear_fc1._extra_state/shard_0_2",
                          "decoder.layers.mlp.linear_fc1._extra_state/shard_1_2"));
}

TEST(TorchDistNamesTest, LayersThatDifferKeepTheirNumbers) {
  const auto names =
      names_of({"decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.1.mlp.router.weight",
                "mtp.layers.0.eh_proj.weight"});
  EXPECT_FALSE(names.are_layers_stacked());
  EXPECT_THAT(keys_of(names, "decoder.layers.1.mlp.router.weight"),
              ElementsAre("decoder.layers.1.mlp.router.weight"));
  EXPECT_THAT(names.extra_states(),
              ElementsAre("decoder.layers.0.mlp.linear_fc1._extra_state/shard_0_1",
                          "mtp.layers.0.eh_proj._extra_state/shard_0_1"));
}

TEST(TorchDistNamesTest, LayersThatAreAlikeCanKeepTheirNumbers) {
  const std::string first = "decoder.layers.0.mlp.experts.linear_fc1.weight";
  std::map<std::string, TensorMeta> metas;
  for (const std::string number : {"0", "1"}) {
    metas[first + number] = {first + number, DType::float32, {4, 2}};
  }
  const TorchDistNames names(metas, "there", megatron::LayerNames::numbered);
  EXPECT_FALSE(names.are_layers_stacked());
  const auto& place = names.places_of(first + "1").front();
  EXPECT_EQ(place.key, "decoder.layers.0.mlp.experts.experts.linear_fc1.weight");
  EXPECT_THAT(place.index, ElementsAre(1));
  EXPECT_THAT(place.stacked, ElementsAre(2));
}

TEST(TorchDistNamesTest, ExpertsAreStackedUnderBothOfTheirNames) {
  const std::string layer = "decoder.layers.0.mlp.experts.";
  const auto sequential = names_of(
      {layer + "local_experts.0.linear_fc1.weight", layer + "local_experts.1.linear_fc1.weight"});
  const auto grouped = names_of({layer + "linear_fc1.weight0", layer + "linear_fc1.weight1"});
  const auto& one = sequential.places_of(layer + "local_experts.1.linear_fc1.weight").front();
  const auto& other = grouped.places_of(layer + "linear_fc1.weight1").front();
  for (const auto& place : {one, other}) {
    EXPECT_EQ(place.key, "decoder.layers.mlp.experts.experts.linear_fc1.weight");
    EXPECT_THAT(place.index, ElementsAre(0, 1));
    EXPECT_THAT(place.stacked, ElementsAre(1, 2));
  }
  EXPECT_THAT(
      sequential.extra_states(),
      ElementsAre("decoder.layers.mlp.experts.experts.linear_fc1._extra_state/shard_0.0_1.2",
                  "decoder.layers.mlp.experts.experts.linear_fc1._extra_state/shard_0.1_1.2"));
}

TEST(TorchDistNamesTest, ExpertsAreNumberedWithoutHoles) {
  const std::string layer = "decoder.layers.0.mlp.experts.local_experts.";
  EXPECT_THAT(
      [&] {
        names_of({layer + "0.linear_fc1.weight", layer + "2.linear_fc1.weight"});
      },
      ThrowsError(
          ErrorKind::unsupported,
          layer +
              "0.linear_fc1.weight: experts: expected all experts from 0 to 2, found 2 of them"));
}

TEST(TorchDistNamesTest, ExpertsOfALayerHaveOneDtype) {
  const std::string layer = "decoder.layers.0.mlp.experts.local_experts.";
  const std::string first = layer + "0.linear_fc1.weight";
  const std::string second = layer + "1.linear_fc1.weight";
  const std::map<std::string, TensorMeta> metas = {{first, {first, DType::float32, {4, 2}}},
                                                   {second, {second, DType::bfloat16, {4, 2}}}};
  EXPECT_THAT(
      [&] { TorchDistNames(metas, "there"); },
      ThrowsError(ErrorKind::unsupported, second + ": experts: expected float32 [4, 2] as in '" +
                                              first + "', found bfloat16 [4, 2]"));
}

TEST(TorchDistNamesTest, NormsHaveTheNamesOfMegatronsLayers) {
  const std::string layer = "decoder.layers.0.";
  const auto dense =
      names_of({layer + "input_layernorm.weight", layer + "pre_mlp_layernorm.weight",
                layer + "mlp.linear_fc1.weight", layer + "self_attention.linear_qkv.weight"});
  EXPECT_THAT(keys_of(dense, layer + "input_layernorm.weight"),
              ElementsAre("decoder.layers.self_attention.linear_qkv.layer_norm_weight"));
  EXPECT_THAT(keys_of(dense, layer + "pre_mlp_layernorm.weight"),
              ElementsAre("decoder.layers.mlp.linear_fc1.layer_norm_weight"));
  const auto latent =
      names_of({layer + "input_layernorm.weight", layer + "self_attention.q_layernorm.weight",
                layer + "self_attention.linear_q_up_proj.weight"});
  EXPECT_THAT(keys_of(latent, layer + "input_layernorm.weight"),
              ElementsAre("decoder.layers.input_layernorm.weight"));
  EXPECT_THAT(keys_of(latent, layer + "self_attention.q_layernorm.weight"),
              ElementsAre("decoder.layers.self_attention.q_layernorm.weight",
                          "decoder.layers.self_attention.linear_q_up_proj.layer_norm_weight"));
}

class TorchDistWriterTest : public testing::Test {
 protected:
  std::string path() const { return tmp_ / "run"; }

  void write(const CheckpointReader& source, FileSystem* fs = nullptr) {
    std::vector<Value> values;
    for (std::size_t v = 0; v < source.contents().values.size(); ++v) {
      values.push_back(source.read_value(v));
    }
    const auto writer = create_checkpoint(fs == nullptr ? fs_ : *fs, path(), source.contents(),
                                          std::move(values), {.format = Format("megatron")});
    test::copy_checkpoint(source, *writer);
  }
  std::map<std::string, std::string> files() const {
    std::map<std::string, std::string> found;
    for (const auto& entry : stdfs::directory_iterator(path())) {
      std::ifstream in(entry.path(), std::ios::binary);
      found[entry.path().filename()] = {std::istreambuf_iterator<char>(in), {}};
    }
    return found;
  }
  /// Returns the values in `common.pt`.
  std::map<std::string, Value> common_values() {
    const auto common =
        open_checkpoint(fs_, path() + "/common.pt", {.as_dict = {"argparse.Namespace"}});
    std::map<std::string, Value> values;
    for (std::size_t v = 0; v < common->contents().values.size(); ++v) {
      values.emplace(common->contents().values[v].name, common->read_value(v));
    }
    return values;
  }
  void clear() {
    for (const auto& entry : stdfs::directory_iterator(tmp_.path())) {
      stdfs::remove_all(entry.path());
    }
  }

  FileSystem& fs_ = FileSystem::posix();
  test::TemporaryDirectory tmp_;
};

std::string layer(int number) {
  return "decoder.layers." + std::to_string(number) + ".mlp.linear_fc1.weight";
}

/// Two layers with a moment and a step.
MemoryCheckpoint trained_without_iteration(float second_step = 2) {
  MemoryCheckpoint source("trained");
  for (const int number : {0, 1}) {
    const auto first = static_cast<float>(number * 4);
    source.add({"model." + layer(number), DType::float32, {2, 2}},
               bytes_of<float>({first, first + 1, first + 2, first + 3}));
    source.add({"optim.state." + layer(number) + ".exp_avg", DType::float32, {2, 2}},
               bytes_of<float>({first, first, first, first + 9}));
    source.add({"optim.state." + layer(number) + ".step", DType::float32, {}},
               bytes_of<float>({number == 0 ? 2 : second_step}));
  }
  return source;
}

MemoryCheckpoint trained_model(float second_step = 2) {
  MemoryCheckpoint source = trained_without_iteration(second_step);
  source.add_value("iteration", Value(std::int64_t{7}));
  return source;
}

// Shows F3.
TEST_F(TorchDistWriterTest, LayersAreRowsOfOneTensor) {
  write(trained_model());
  const auto reader = open_checkpoint(fs_, path());
  EXPECT_EQ(reader->format(), Format::dcp);
  std::map<std::string, Bytes> found;
  for (std::size_t t = 0; t < reader->contents().tensors.size(); ++t) {
    EXPECT_EQ(reader->contents().tensors[t].meta.shape, (Shape{2, 2, 2}));
    found[reader->contents().tensors[t].meta.fqn] = test::whole_tensor(*reader, t);
  }
  const Bytes weights = bytes_of<float>({0, 1, 2, 3, 4, 5, 6, 7});
  const std::string name = "decoder.layers.mlp.linear_fc1.weight";
  EXPECT_EQ(found, (std::map<std::string, Bytes>{{name, weights},
                                                 {"optimizer.state.exp_avg." + name,
                                                  bytes_of<float>({0, 0, 0, 9, 4, 4, 4, 13})},
                                                 {"optimizer.state.param." + name, weights}}));
  const auto values = common_values();
  EXPECT_EQ(values.at("iteration"), Value(std::int64_t{7}));
  EXPECT_EQ(values.at("optimizer.state.common_step"), Value(2.0));
  EXPECT_EQ(values.at("optimizer.optimizer.param_groups.1.wd_mult"), Value(0.0));
  EXPECT_EQ(values.at("args.no_save_rng"), Value(true));
}

TEST_F(TorchDistWriterTest, FieldsThatNeMoNamesOtherwiseAreNotAddedAgain) {
  MemoryCheckpoint source = trained_model();
  for (const int group : {0, 1}) {
    const std::string fields = "optim.param_groups." + std::to_string(group) + ".";
    source.add_value(fields + "pre_lr_mult", Value(0.5));
    source.add_value(fields + "pre_wd_mult", Value(group == 0 ? 1.0 : 0.0));
  }
  write(source);
  const auto values = common_values();
  const std::string fields = "optimizer.optimizer.param_groups.1.";
  EXPECT_EQ(values.at(fields + "pre_lr_mult"), Value(0.5));
  EXPECT_EQ(values.at(fields + "pre_wd_mult"), Value(0.0));
  EXPECT_FALSE(values.contains(fields + "lr_mult"));
  EXPECT_FALSE(values.contains(fields + "wd_mult"));
  EXPECT_EQ(values.at(fields + "is_decoupled_lr"), Value(false));
}

TEST_F(TorchDistWriterTest, MegatronKeepsOneNumberOfSteps) {
  EXPECT_THAT([&] { write(trained_model(3)); },
              ThrowsError(ErrorKind::unsupported,
                          layer(1) + ".step: step: expected 2.0 as in 'optim.state." + layer(0)));
  EXPECT_TRUE(stdfs::is_empty(tmp_.path()));
}

/// Megatron stacks the state of all layers into one tensor, which has one dtype and no gaps.
TEST_F(TorchDistWriterTest, StateThatCannotBeStackedIsRefused) {
  const auto with_state_of_second_layer = [](std::optional<DType> dtype) {
    MemoryCheckpoint source("trained");
    for (const int number : {0, 1}) {
      source.add({"model." + layer(number), DType::float32, {2}}, bytes_of<float>({1, 2}));
    }
    source.add({"optim.state." + layer(0) + ".exp_avg", DType::float32, {2}},
               bytes_of<float>({1.0001F, 2}));
    if (dtype) {
      source.add({"optim.state." + layer(1) + ".exp_avg", *dtype, {2}},
                 bytes_of<std::uint16_t>({0x3f80, 0xc040}));
    }
    return source;
  };
  EXPECT_THAT([&] { write(with_state_of_second_layer(DType::bfloat16)); },
              ThrowsError(ErrorKind::unsupported,
                          layer(1) +
                              ".exp_avg: dtype of the layers, which Megatron stacks: "
                              "expected float32 as for 'optim.state." +
                              layer(0) + ".exp_avg', found bfloat16"));
  EXPECT_THAT([&] { write(with_state_of_second_layer(std::nullopt)); },
              ThrowsError(ErrorKind::unsupported,
                          "layers of 'optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight'"
                          ", which Megatron stacks: expected state of all 2, found of 1"));
  EXPECT_TRUE(stdfs::is_empty(tmp_.path()));
}

TEST_F(TorchDistWriterTest, NamesOfOtherFrameworksAreRefused) {
  MemoryCheckpoint source;
  source.add({"model.layers.0.mlp.up_proj.weight", DType::float32, {1}}, bytes_of<float>({1}));
  EXPECT_THAT([&] { write(source); },
              ThrowsError(ErrorKind::unsupported, "a recipe gives tensors Megatron's names"));
}

TEST_F(TorchDistWriterTest, OtherGroupsThanMegatronsAreRefused) {
  MemoryCheckpoint source = trained_model();
  for (const int group : {0, 1, 2}) {
    source.add_value("optim.param_groups." + std::to_string(group) + ".lr", Value(0.1));
  }
  EXPECT_THAT(
      [&] { write(source); },
      ThrowsError(ErrorKind::unsupported, "one without, as Megatron has them, found 3 groups"));
}

/// Parts of an optimizer (groups, steps, a loss scale) are refused if it has no other state.
TEST_F(TorchDistWriterTest, PartsOfAnOptimizerWithoutStateAreRefused) {
  const std::string name = "model." + layer(0);
  const auto weights = [&] {
    MemoryCheckpoint source;
    source.add({name, DType::float32, {1}}, bytes_of<float>({1}));
    return source;
  };
  const auto refused = [](const std::string& part) {
    return ThrowsError(ErrorKind::unsupported,
                       "optim: a part of the optimizer: expected also state of a weight, in the "
                       "shape of the weight, such as optim.state.<weight>.exp_avg, found only '" +
                           part + "'");
  };
  MemoryCheckpoint groups = weights();
  groups.add_value("optim.param_groups.0.lr", Value(0.1));
  EXPECT_THAT([&] { write(groups); }, refused("optim.param_groups.0.lr"));
  MemoryCheckpoint steps = weights();
  steps.add({"optim.state." + layer(0) + ".step", DType::float32, {}}, bytes_of<float>({2}));
  EXPECT_THAT([&] { write(steps); }, refused("optim.state." + layer(0) + ".step"));
  MemoryCheckpoint scaler = weights();
  scaler.add({"optim.grad_scaler.scale", DType::float32, {}}, bytes_of<float>({2}));
  EXPECT_THAT([&] { write(scaler); }, refused("optim.grad_scaler.scale"));
  scaler.add_value("optim.param_groups.0.lr", Value(0.1));
  EXPECT_THAT([&] { write(scaler); },
              ThrowsError(ErrorKind::unsupported, "'optim.grad_scaler.scale' and 1 more"));
}

TEST_F(TorchDistWriterTest, OtherEntriesOfAnOptimizerKeepTheirNames) {
  MemoryCheckpoint source = trained_model();
  source.add_value("optimizer", Value("adamw"));
  source.add_value("optim.foo", Value(std::int64_t{3}));
  source.add({"optimizer.grad_scaler.empty", DType::float32, {0}}, {});
  write(source);
  const auto reader = open_checkpoint(fs_, path());
  EXPECT_NE(reader->contents().find_tensor("optimizer.grad_scaler.empty"), nullptr);
  std::map<std::string, Value> values;
  for (std::size_t v = 0; v < reader->contents().values.size(); ++v) {
    values.emplace(reader->contents().values[v].name, reader->read_value(v));
  }
  EXPECT_EQ(values.at("optimizer"), Value("adamw"));
  EXPECT_EQ(values.at("optim.foo"), Value(std::int64_t{3}));
}

/// A run in fp16 with experts has two optimizers in Megatron, and each has its own loss scale.
TEST_F(TorchDistWriterTest, EachOptimizerHasItsOwnLossScale) {
  const auto with_scales = [](bool has_experts) {
    MemoryCheckpoint source = trained_model();
    if (has_experts) {
      const std::string expert = "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight";
      source.add({"model." + expert, DType::float32, {1}}, bytes_of<float>({1}));
      source.add({"optim.state." + expert + ".exp_avg", DType::float32, {1}}, bytes_of<float>({1}));
    }
    for (const float number : {0.0F, 1.0F}) {
      const std::string scaler =
          "optimizer." + std::string(number == 0 ? "0" : "1") + ".grad_scaler.";
      source.add({scaler + "scale", DType::float32, {1}}, bytes_of<float>({8 + number}));
      const std::string name = scaler + "growth_tracker";
      source.add_value(name, Value(static_cast<std::int64_t>(number))).key_path = {
          "optimizer", static_cast<std::int64_t>(number), "grad_scaler", "growth_tracker"};
    }
    return source;
  };
  write(with_scales(true));
  const auto common =
      open_checkpoint(fs_, path() + "/common.pt", {.as_dict = {"argparse.Namespace"}});
  EXPECT_EQ(test::floats(*common, "optimizer.0.grad_scaler.scale"), std::vector<float>{8});
  EXPECT_EQ(test::floats(*common, "optimizer.1.grad_scaler.scale"), std::vector<float>{9});
  EXPECT_EQ(common_values().at("optimizer.1.grad_scaler.growth_tracker"), Value(1));
  const auto moved = open_checkpoint(fs_, path());
  for (const auto& tensor : moved->contents().tensors) {
    EXPECT_EQ(tensor.meta.fqn.find("grad_scaler"), std::string::npos) << tensor.meta.fqn;
  }
  clear();
  EXPECT_THAT(
      [&] { write(with_scales(false)); },
      ThrowsError(ErrorKind::unsupported,
                  "optimizer.1.grad_scaler.growth_tracker: optimizers: expected the loss "
                  "scale of one of Megatron's optimizers, found one of a second optimizer"));
}

TEST_F(TorchDistWriterTest, TwoOptimizersAreRefused) {
  MemoryCheckpoint source = trained_model();
  source.add_value("optim.param_groups.0.lr", Value(0.1));
  source.add_value("optimizer.param_groups.0.lr", Value(9.0));
  EXPECT_THAT(
      [&] { write(source); },
      ThrowsError(ErrorKind::unsupported, "optimizers: expected one optimizer, as Megatron has"));
}

TEST_F(TorchDistWriterTest, KeysOfCommonKeepTheirOrderAndDictsInGroupsStayDicts) {
  MemoryCheckpoint source = trained_model();
  std::uint32_t order = 1;
  const auto add = [&](KeyPath path, Value value) {
    ValueEntry& entry = source.add_value(spell(path), std::move(value));
    entry.key_path = std::move(path);
    entry.dict_order = order++;
  };
  const KeyPath group{"optim", "param_groups", std::int64_t{0}};
  const auto in_group = [&](KeyPath behind) {
    KeyPath path = group;
    path.insert(path.end(), behind.begin(), behind.end());
    return path;
  };
  add({"zeta", "b"}, Value(1));
  add({"zeta", "a"}, Value(2));
  add({"alpha"}, Value(3));
  add(in_group({"weight_decay"}), Value(0.1));
  add(in_group({"lr"}), Value(0.5));
  add(in_group({"extra", "y"}), Value(4));
  add(in_group({"extra", "x"}), Value(5));
  write(source);
  const auto common =
      open_checkpoint(fs_, path() + "/common.pt", {.as_dict = {"argparse.Namespace"}});
  std::map<std::uint32_t, std::string> names;
  for (const ValueEntry& value : common->contents().values) {
    names.emplace(value.dict_order, value.name);
  }
  std::vector<std::string> found;
  for (const auto& [number, name] : names) {
    if (name.starts_with("zeta") || name == "alpha" ||
        name.starts_with("optimizer.param_groups.0.")) {
      found.push_back(name);
    }
  }
  found.resize(std::min<std::size_t>(found.size(), 7));
  EXPECT_THAT(found,
              ElementsAre("zeta.b", "zeta.a", "alpha", "optimizer.param_groups.0.weight_decay",
                          "optimizer.param_groups.0.lr", "optimizer.param_groups.0.extra.y",
                          "optimizer.param_groups.0.extra.x"));
  const auto extra = std::ranges::find(common->contents().values,
                                       "optimizer.param_groups.0.extra.x", &ValueEntry::name);
  ASSERT_NE(extra, common->contents().values.end());
  EXPECT_EQ(extra->key_path.back(), Key("x"));
}

TEST_F(TorchDistWriterTest, TheIterationOfOtherFrameworksIsWhereMegatronReadsIt) {
  for (const char* name : {"deepspeed.global_steps", "global_steps", "global_step", "step"}) {
    SCOPED_TRACE(name);
    clear();
    MemoryCheckpoint source = trained_without_iteration();
    source.add_value(name, Value(std::int64_t{12}));
    source.add_value("epoch", Value(std::int64_t{3}));
    write(source);
    EXPECT_EQ(common_values().at("iteration"), Value(std::int64_t{12}));
  }
  clear();
  MemoryCheckpoint two = trained_without_iteration();
  two.add_value("global_step", Value(std::int64_t{12}));
  two.add_value("step", Value(std::int64_t{13}));
  write(two);
  EXPECT_FALSE(common_values().contains("iteration"));
  clear();
  MemoryCheckpoint own = trained_model();
  own.add_value("step", Value(std::int64_t{12}));
  write(own);
  EXPECT_EQ(common_values().at("iteration"), Value(std::int64_t{7}));
}

/// A dry run uses this check.
TEST_F(TorchDistWriterTest, WhatTheWriterRefusesIsKnownBeforeItBegins) {
  const CreateOptions options{.format = Format("megatron")};
  MemoryCheckpoint groups = trained_model();
  for (const int group : {0, 1, 2}) {
    groups.add_value("optim.param_groups." + std::to_string(group) + ".lr", Value(0.1));
  }
  std::vector<Value> values;
  for (std::size_t v = 0; v < groups.contents().values.size(); ++v) {
    values.push_back(groups.read_value(v));
  }
  EXPECT_THAT([&] { check_staging(fs_, path(), groups.contents(), values, options); },
              ThrowsError(ErrorKind::unsupported, "found 3 groups"));
  const MemoryCheckpoint steps = trained_model(3);
  const auto read = [&](std::size_t t) {
    const Bytes bytes = test::whole_tensor(steps, t);
    return FormatWriter::Element{
        steps.contents().tensors[t].meta.dtype,
        std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size())};
  };
  EXPECT_THAT(
      [&] {
        writer_of(options.format)
            .check_elements(path(), steps.contents(), {steps.read_value(0)}, options, read);
      },
      ThrowsError(ErrorKind::unsupported, layer(1) + ".step: step: expected 2.0"));
}

/// Megatron's optimizer needs an fp32 copy of each 16-bit weight.
TEST_F(TorchDistWriterTest, CopiesOfWeightsOf16BitsAreWidened) {
  const std::string name = "decoder.layers.mlp.linear_fc1.weight";
  const auto model = [&] {
    MemoryCheckpoint source("half");
    source.add({"model." + layer(0), DType::bfloat16, {2}},
               bytes_of<std::uint16_t>({0x3f80, 0xc040}));
    source.add({"optim.state." + layer(0) + ".exp_avg", DType::float32, {2}},
               bytes_of<float>({5, 6}));
    return source;
  };
  const auto notes = [&](const MemoryCheckpoint& source) {
    return writer_of(Format("megatron"))
        .notes(path(), source.contents(), {.format = Format("megatron")},
               [] { return std::vector<Value>(); }, {});
  };
  const auto copy_of = [&] {
    const auto reader = open_checkpoint(fs_, path());
    const auto& tensors = reader->contents().tensors;
    const auto found = std::ranges::find(tensors, "optimizer.state.param." + name,
                                         [](const TensorEntry& each) { return each.meta.fqn; });
    EXPECT_NE(found, tensors.end());
    EXPECT_EQ(found->meta.dtype, DType::float32);
    return test::whole_tensor(*reader, static_cast<std::size_t>(found - tensors.begin()));
  };
  write(model());
  EXPECT_EQ(copy_of(), bytes_of<float>({1, -3}));
  ASSERT_EQ(notes(model()).size(), 1U);
  EXPECT_EQ(notes(model()).front().where.fqn, layer(0));
  for (const char* kind : {"fp32_param", "master_param", "param"}) {
    SCOPED_TRACE(kind);
    clear();
    MemoryCheckpoint source = model();
    source.add({"optim.state." + layer(0) + "." + kind, DType::float32, {2}},
               bytes_of<float>({1.0001F, -3.0001F}));
    write(source);
    EXPECT_EQ(copy_of(), bytes_of<float>({1.0001F, -3.0001F}));
    EXPECT_TRUE(notes(source).empty());
  }
  EXPECT_TRUE(notes(trained_model()).empty());
}

/// Newer versions of Megatron keep the state of the run in an object. It is not put into the file.
TEST_F(TorchDistWriterTest, AnObjectInPlaceOfTheCommonFileIsNoted) {
  MemoryCheckpoint source("torch_dist");
  source.add({"decoder.layers.mlp.linear_fc1.weight", DType::float32, {1, 2}},
             bytes_of<float>({1, 2}));
  source.add_value("common_state/shard_0_1", Value(Value::List{Value(Value::Dict{})}));
  const auto notes_with = [&](std::vector<ExtraFile> files) {
    return writer_of(Format("megatron"))
        .notes(path(), source.contents(),
               {.format = Format("megatron"), .extra_files = std::move(files)},
               [&] { return std::vector<Value>{source.read_value(0)}; }, {});
  };
  const auto notes = notes_with({});
  ASSERT_EQ(notes.size(), 1U);
  EXPECT_THAT(notes[0].found, testing::HasSubstr("common.pt gets only defaults"));
  EXPECT_TRUE(notes_with({{.path = "source/common.pt", .name = "common.pt"}}).empty());
}

TEST_F(TorchDistWriterTest, CopiesOfManyBlocksAreWidened) {
  const std::int64_t numel = (std::int64_t{1} << 21) + 3;  // of bf16: a block of 4 MiB and a rest
  std::vector<std::uint16_t> weights(static_cast<std::size_t>(numel));
  for (std::size_t i = 0; i < weights.size(); ++i) {
    weights[i] = static_cast<std::uint16_t>(0x3f80 + i % 97);
  }
  MemoryCheckpoint source("half");
  source.add({"model." + layer(0), DType::bfloat16, {numel}}, bytes_of(weights));
  source.add({"optim.state." + layer(0) + ".exp_avg", DType::bfloat16, {numel}}, bytes_of(weights));
  write(source);
  const auto reader = open_checkpoint(fs_, path());
  ASSERT_EQ(reader->contents().tensors.size(), 3U);
  for (std::size_t t = 0; t < 3; ++t) {
    const TensorMeta& meta = reader->contents().tensors[t].meta;
    const Bytes found = test::whole_tensor(*reader, t);
    if (meta.dtype == DType::bfloat16) {
      EXPECT_EQ(found, bytes_of(weights)) << meta.fqn;
      continue;
    }
    EXPECT_EQ(meta.fqn, "optimizer.state.param.decoder.layers.mlp.linear_fc1.weight");
    ASSERT_EQ(found.size(), weights.size() * 4);
    for (std::size_t i = 0; i < weights.size(); i += i % 1000 == 0 ? std::size_t{7} : 1) {
      std::uint32_t bits = 0;
      std::memcpy(&bits, found.data() + i * 4, 4);
      ASSERT_EQ(bits, std::uint32_t{weights[i]} << 16) << i;
    }
  }
}

// Shows E4.
TEST_F(TorchDistWriterTest, AfterAFailureEverythingOrNothingIsThere) {
  write(trained_model());
  const auto expected = files();
  EXPECT_TRUE(expected.contains("common.pt") && expected.contains("metadata.json"));
  clear();
  FaultFileSystem faulty(fs_, tmp_.path());
  bool has_succeeded = false;
  for (std::int64_t i = 0; !has_succeeded; ++i) {
    SCOPED_TRACE("operation " + std::to_string(i));
    ASSERT_LT(i, 500);
    faulty.fail_operation(i);
    try {
      write(trained_model(), &faulty);
      has_succeeded = !faulty.has_failed();
      EXPECT_TRUE(files() == expected);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::io) << error.what();
      EXPECT_TRUE(stdfs::is_empty(tmp_.path()));
    }
    clear();
  }
}

// Shows E4.
TEST_F(TorchDistWriterTest, InterruptedWorkIsResumedAndTheFilesAreTheSame) {
  const MemoryCheckpoint source = trained_model();
  write(source);
  const auto expected = files();
  clear();
  CreateOptions options{.format = Format("megatron")};
  options.journal = JournalOptions{.identity = {{"source", "trained"}}};
  const auto start = [&] {
    return create_checkpoint(fs_, path(), source.contents(), {source.read_value(0)}, options);
  };
  {
    const auto writer = start();
    const auto order = writer->write_order();
    for (std::size_t i = 0; i + 1 < order.size(); ++i) {
      writer->write_block(order[i], 0, test::whole_tensor(source, order[i].tensor_index));
    }
    EXPECT_TRUE(writer->keep_work());
  }
  options.journal->kept_work = KeptWork::resume;
  const auto writer = start();
  EXPECT_TRUE(writer->is_resumed());
  std::size_t num_resumed = 0;
  for (const auto id : writer->write_order()) {
    Bytes bytes = test::whole_tensor(source, id.tensor_index);
    if (writer->resume_block(id, 0, bytes)) {
      ++num_resumed;
    } else {
      writer->write_block(id, 0, bytes);
    }
  }
  EXPECT_EQ(num_resumed, 3U);  // of 4 weights and moments; steps are read again
  writer->commit();
  EXPECT_TRUE(files() == expected);
}

}  // namespace
}  // namespace tessera::formats
