#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "formats/deepspeed.h"
#include "formats/pickle/pickler.h"
#include "formats/torch_zip/torch_save_layout.h"
#include "support/copy_checkpoint.h"
#include "support/error_matchers.h"
#include "support/expectation.h"
#include "support/fault_file_system.h"
#include "support/fixtures.h"
#include "support/memory_checkpoint.h"
#include "support/reading.h"
#include "support/sampling.h"
#include "support/temporary_directory.h"
#include "tessera/base/error.h"
#include "tessera/formats/create.h"
#include "tessera/formats/detect.h"
#include "tessera/formats/format_driver.h"
#include "tessera/formats/format_writer.h"

namespace tessera::formats {
namespace {

using test::Bytes;
using test::bytes_of;
using test::FaultFileSystem;
using test::kSampleStep;
using test::MemoryCheckpoint;
using test::ThrowsError;
using test::values_of;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
namespace stdfs = std::filesystem;

const std::string kValidSources = test::fixture("deepspeed/valid/");
const std::string kStepFolder = "global_step0_universal";
const std::string kZero = kStepFolder + "/zero";

/// Adds `model.<name>` with numbers from `first` on.
void add_weight(MemoryCheckpoint& source, const std::string& name, const Shape& shape,
                float first = 1, DType dtype = DType::float32) {
  const auto numel = static_cast<std::size_t>(numel_of(shape));
  Bytes bytes(numel * itemsize(dtype));
  if (dtype == DType::float32) {
    std::vector<float> numbers(numel);
    for (float& number : numbers) number = first++;
    bytes = bytes_of(numbers);
  }
  source.add({"model." + name, dtype, shape}, bytes).key_path = {"model", name};
}

void add_state(MemoryCheckpoint& source, const std::string& name, const std::string& kind,
               const Shape& shape, DType dtype = DType::float32) {
  const Bytes bytes(static_cast<std::size_t>(numel_of(shape)) * itemsize(dtype), std::byte{64});
  source.add({"optim.state." + name + "." + kind, dtype, shape}, bytes).key_path = {
      "optim", "state", name, kind};
}

void add_value(MemoryCheckpoint& source, const KeyPath& path, Value value) {
  source.add_value(spell(path), std::move(value)).key_path = path;
  auto& values = source.contents_for_change().values;
  for (ValueEntry& entry : values) {
    if (entry.name == spell(path)) entry.key_path = path;
  }
}

/// The state of an FSDP2 run as DCP stores it: two parameters with AdamW's state, a buffer, a
/// group, and a value and a tensor of the user.
MemoryCheckpoint trained() {
  MemoryCheckpoint source;
  for (const auto& [name, shape] :
       std::map<std::string, Shape>{{"scale", {}}, {"up.weight", {3, 2}}}) {
    add_weight(source, name, shape);
    for (const char* const kind : {"exp_avg", "exp_avg_sq"}) add_state(source, name, kind, shape);
    add_state(source, name, "step", {});
  }
  add_weight(source, "seen", {2}, 0, DType::int64);
  source.add({"noise", DType::uint8, {3}}, Bytes(3, std::byte{7}));
  add_value(source, {"epoch"}, 4);
  add_value(source, {"optim", "param_groups", 0, "lr"}, 0.5);
  add_value(source, {"optim", "param_groups", 0, "betas"}, Value::Tuple{{0.8, 0.95}});
  add_value(source, {"optim", "param_groups", 0, "params"}, Value::List{"up.weight", "scale"});
  return source;
}

/// Parameters whose files are too many to be synced one after the other (FileSyncs).
MemoryCheckpoint many_parameters() {
  MemoryCheckpoint source;
  Value::List names;
  for (int i = 10; i < 40; ++i) {
    const std::string name = "w" + std::to_string(i);
    add_weight(source, name, {2});
    for (const char* const kind : {"exp_avg", "exp_avg_sq"}) add_state(source, name, kind, {2});
    add_state(source, name, "step", {});
    names.emplace_back(name);
  }
  add_value(source, {"optim", "param_groups", 0, "params"}, std::move(names));
  return source;
}

MemoryCheckpoint bare_weights() {
  MemoryCheckpoint source;
  source.add({"model.up.bias", DType::float32, {2}}, bytes_of<float>({1, 2}));
  source.add({"model.up.weight", DType::float32, {2, 2}}, bytes_of<float>({1, 2, 3, 4}));
  source.add({"num_calls", DType::int64, {}}, bytes_of<std::int64_t>({5}));
  return source;
}

/// The contents with each tensor in one piece.
CheckpointContents whole(const CheckpointReader& source) {
  CheckpointContents contents = source.contents();
  for (TensorEntry& tensor : contents.tensors) tensor.pieces = {{whole_box(tensor.meta.shape), 0}};
  return contents;
}

/// A copy of a checkpoint in which each tensor is one piece.
MemoryCheckpoint in_memory(const CheckpointReader& source) {
  std::vector<std::vector<Bytes>> pieces;
  for (std::size_t i = 0; i < source.contents().tensors.size(); ++i) {
    pieces.push_back({test::whole_tensor(source, i)});
  }
  return MemoryCheckpoint("memory", whole(source), std::move(pieces), values_of(source));
}

/// All entries by name: tensors as dtype, shape and bytes, values as text, aliases as their target.
std::map<std::string, std::string> told(const CheckpointReader& reader) {
  std::map<std::string, std::string> entries;
  const CheckpointContents& contents = reader.contents();
  for (std::size_t i = 0; i < contents.tensors.size(); ++i) {
    const TensorMeta& meta = contents.tensors[i].meta;
    const Bytes bytes = test::whole_tensor(reader, i);
    entries[meta.fqn] = std::string(dtype_name(meta.dtype)) + shape_to_string(meta.shape) +
                        std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }
  for (std::size_t i = 0; i < contents.values.size(); ++i) {
    entries[contents.values[i].name] = value_to_string(reader.read_value(i), 4096);
  }
  for (const Alias& alias : contents.aliases) entries[alias.fqn] = "alias of " + alias.target;
  return entries;
}

class UniversalTest : public testing::Test {
 protected:
  void write(const CheckpointReader& source, int num_threads = 1,
             OverwritePolicy overwrite = OverwritePolicy::refuse, FileSystem* fs = nullptr) {
    const MemoryCheckpoint memory = in_memory(source);
    const auto writer = create_deepspeed(fs == nullptr ? fs_ : *fs, path(), memory.contents(),
                                         values_of(source), overwrite);
    test::copy_checkpoint(memory, *writer, num_threads);
  }
  std::unique_ptr<CheckpointReader> open(const std::string& within = {}) const {
    return open_checkpoint(fs_, within.empty() ? path() : join_path(path(), within));
  }
  std::string path() const { return tmp_ / "run"; }
  std::string path(const std::string& within) const { return join_path(path(), within); }

  /// All files below the temporary directory, with their bytes.
  std::map<std::string, std::string> all_files() const {
    std::map<std::string, std::string> files;
    for (const auto& entry : stdfs::recursive_directory_iterator(tmp_.path())) {
      if (!entry.is_regular_file()) continue;
      std::ostringstream bytes;
      bytes << std::ifstream(entry.path(), std::ios::binary).rdbuf();
      files[stdfs::relative(entry.path(), tmp_.path())] = bytes.str();
    }
    return files;
  }
  std::vector<std::string> all_names() const {
    std::vector<std::string> names;
    for (const auto& [name, bytes] : all_files()) names.push_back(name);
    return names;
  }
  void clear() {
    for (const std::string& name : fs_.list_directory(tmp_.path())) fs_.remove_all(tmp_ / name);
  }

  FileSystem& fs_ = FileSystem::posix();
  test::TemporaryDirectory tmp_;
};

// Writing

// Without this count, `model.w` became the key `w` of the dict `model` and no one was told.
TEST(UniversalChangesTest, AKeyThatGoesIntoTheDictOfTheModelIsCounted) {
  MemoryCheckpoint source;
  add_weight(source, "a", {2});
  const FormatDriver& driver = driver_of(Format("deepspeed"));
  EXPECT_EQ(driver.outermost_changes(source.contents()).num_nested_keys, 0u);
  add_value(source, {"model.w"}, 5);
  EXPECT_EQ(driver.outermost_changes(source.contents()).num_nested_keys, 1u);
  EXPECT_EQ(driver.outermost_changes(bare_weights().contents()).num_nested_keys, 0u);
}

// Shows F2. Everything that a DeepSpeed trainer held is in the written checkpoint.
TEST_F(UniversalTest, WhatZeroHeldComesBack) {
  for (const auto& entry : stdfs::directory_iterator(kValidSources)) {
    if (!entry.is_directory()) continue;
    if (entry.path().filename() == "pipeline_fp32_without_zero") continue;  // refused: `optim`
    SCOPED_TRACE(entry.path());
    write(*open_checkpoint(fs_, entry.path()));
    const auto reader = open();
    test::expect_holds(*reader, entry.path().string() + ".expect.json");
    EXPECT_EQ(reader->format(), Format("deepspeed"));
    EXPECT_THAT(reader->contents().opening_findings, IsEmpty());
    EXPECT_EQ(told(*reader), told(*open(read_file(fs_, path("latest_universal"), 99))));
    EXPECT_EQ(told(*reader), told(*open_checkpoint(fs_, entry.path())));
    clear();
  }
}

// Shows F2.
TEST_F(UniversalTest, WhatFsdpHeldComesBack) {
  const MemoryCheckpoint source = trained();
  write(source);
  EXPECT_EQ(told(*open()), told(source));
  const CheckpointContents contents = open()->contents();
  EXPECT_EQ(contents.find_tensor("model.up.weight")->key_path, (KeyPath{"model", "up.weight"}));
  EXPECT_EQ(contents.find_tensor("noise")->key_path, KeyPath{});
}

// Shows F2. Weights without nested dicts, as in a file of Hugging Face, are those of the module.
TEST_F(UniversalTest, BareWeightsGetWhatDeepSpeedNeeds) {
  write(bare_weights());
  EXPECT_THAT(all_names(),
              ElementsAre("run/" + kStepFolder + "/mp_rank_00_model_states.pt",
                          "run/" + kZero + "/model.up.bias/exp_avg.pt",
                          "run/" + kZero + "/model.up.bias/exp_avg_sq.pt",
                          "run/" + kZero + "/model.up.bias/fp32.pt",
                          "run/" + kZero + "/model.up.bias/step.pt",
                          "run/" + kZero + "/model.up.weight/exp_avg.pt",
                          "run/" + kZero + "/model.up.weight/exp_avg_sq.pt",
                          "run/" + kZero + "/model.up.weight/fp32.pt",
                          "run/" + kZero + "/model.up.weight/step.pt",
                          "run/" + kZero + "/optimizer_state.pt",
                          "run/" + kStepFolder + "/zero_pp_rank_0_mp_rank_00_model_states.pt",
                          "run/latest_universal"));
  const auto reader = open();
  std::vector<std::string> names;
  for (const auto& [name, bytes] : told(*reader)) names.push_back(name);
  EXPECT_THAT(names,
              ElementsAre("model.model.up.bias", "model.model.up.weight", "model.num_calls"));
  EXPECT_EQ(test::whole_tensor(*reader, 1), bytes_of<float>({1, 2, 3, 4}));
  const auto moments = open_checkpoint(fs_, path(kZero + "/model.up.weight/exp_avg.pt"));
  EXPECT_EQ(moments->contents().find_tensor("param")->meta.shape, (Shape{2, 2}));
  EXPECT_EQ(test::whole_tensor(*moments, 0), Bytes(16));
}

// Shows F2. If a run has more groups than the file, DeepSpeed silently does not load the weights of
// the other groups.
TEST_F(UniversalTest, ThereAreAsManyGroupsAsParameters) {
  write(trained());
  const auto file = open_checkpoint(fs_, path(kZero + "/optimizer_state.pt"));
  const auto entries = told(*file);
  EXPECT_EQ(entries.at("param_groups.0.lr"), "0.5");
  EXPECT_EQ(entries.at("param_groups.1.params"), "[1]");
  EXPECT_FALSE(entries.contains("param_groups.2.params"));
  EXPECT_EQ(entries.at("optimizer_state_dict.param_groups.0.lr"), "0.5");
  EXPECT_TRUE(entries.contains("optimizer_state_dict.state.0.step"));
}

// Shows F2, E13. SGD without momentum has state without items.
TEST_F(UniversalTest, DictsWithoutItemsComeBack) {
  MemoryCheckpoint source = bare_weights();
  add_value(source, {"optim", "state"}, Value::Dict{});
  add_value(source, {"optim", "param_groups", 0, "lr"}, 0.5);
  add_value(source, {"optim", "param_groups", 0, "options"}, Value::Dict{});
  add_value(source, {"optim", "param_groups", 0, "params"}, Value::List{"up.weight"});
  add_value(source, {"deepspeed", "ds_config", "amp"}, Value::Dict{});
  write(source);
  EXPECT_EQ(told(*open()), told(source));
  clear();
  MemoryCheckpoint without = bare_weights();
  add_value(without, {"optim", "state", "up.weight"}, Value::Dict{});
  add_value(without, {"optim", "param_groups"}, Value::List{});
  write(without);
  EXPECT_EQ(told(*open()), told(without));
}

// Shows F2. One file has the module, as in ZeRO 1; the other has no tensors, as in ZeRO 3.
TEST_F(UniversalTest, BothFilesOfModelStatesHaveTheValues) {
  write(trained());
  const auto first = told(*open_checkpoint(fs_, path(kStepFolder + "/mp_rank_00_model_states.pt")));
  const auto second =
      told(*open_checkpoint(fs_, path(kStepFolder + "/zero_pp_rank_0_mp_rank_00_model_states.pt")));
  EXPECT_TRUE(first.contains("module.seen"));
  EXPECT_FALSE(second.contains("module.seen"));
  for (const char* const name : {"epoch", "global_steps", "skipped_steps", "dp_world_size",
                                 "mp_world_size", "lr_scheduler", "ds_version", "noise"}) {
    EXPECT_EQ(first.at(name), second.at(name)) << name;
  }
  EXPECT_EQ(first.at("lr_scheduler"), "None");
}

// Shows F2. DeepSpeed looks for the name that its module lists first; the source may not show it.
TEST_F(UniversalTest, ATieIsStoredUnderBothNames) {
  MemoryCheckpoint source = trained();
  source.add_alias("model.head.weight", "model.up.weight");
  source.contents_for_change().aliases[0].key_path = {"model", "head.weight"};
  write(source);
  EXPECT_EQ(told(*open()), told(source));
  const auto files = all_files();
  EXPECT_EQ(files.at("run/" + kZero + "/head.weight/fp32.pt"),
            files.at("run/" + kZero + "/up.weight/fp32.pt"));
  EXPECT_EQ(files.at("run/" + kZero + "/head.weight/exp_avg.pt"),
            files.at("run/" + kZero + "/up.weight/exp_avg.pt"));
}

// Shows F2. PyTorch lists a tied weight under its first name in the module, which may be the second
// one in the order of bytes.
TEST_F(UniversalTest, TheOptimizerMayHaveTheSecondNameOfATiedWeight) {
  for (const bool has_state : {true, false}) {
    MemoryCheckpoint source;
    add_weight(source, "head.weight", {3, 2});
    add_weight(source, "fc", {2});
    source.add_alias("model.wte.weight", "model.head.weight");
    source.contents_for_change().aliases[0].key_path = {"model", "wte.weight"};
    if (has_state) {
      add_state(source, "wte.weight", "exp_avg", {3, 2});
      add_state(source, "wte.weight", "exp_avg_sq", {3, 2});
      add_state(source, "wte.weight", "step", {});
    }
    add_value(source, {"optim", "param_groups", 0, "params"}, Value::List{"wte.weight"});
    write(source);
    const auto files = all_files();
    for (const std::string name : {"head.weight", "wte.weight"}) {
      EXPECT_TRUE(files.contains("run/" + kZero + "/" + name + "/fp32.pt")) << name;
    }
    EXPECT_FALSE(files.contains("run/" + kZero + "/fc/fp32.pt")) << "fc is not trained";
    const auto entries = told(*open());
    EXPECT_EQ(entries.at("model.head.weight"), "alias of model.wte.weight");
    EXPECT_EQ(entries.at("model.wte.weight"), told(source).at("model.head.weight"));
    clear();
  }
}

// Shows F2. Without key paths, the dots in names separate keys, as in a safetensors file.
TEST_F(UniversalTest, SpelledPathsAreUnderstood) {
  MemoryCheckpoint source = trained();
  for (TensorEntry& tensor : source.contents_for_change().tensors) tensor.key_path.clear();
  for (ValueEntry& value : source.contents_for_change().values) value.key_path.clear();
  write(source);
  EXPECT_EQ(told(*open()), told(trained()));
}

// Shows F2. A step that is a number becomes the tensor that PyTorch's optimizers have.
TEST_F(UniversalTest, AStepThatIsANumberBecomesATensor) {
  MemoryCheckpoint source;
  add_weight(source, "w", {2});
  add_state(source, "w", "exp_avg", {2});
  add_value(source, {"optim", "state", "w", "step"}, 7);
  write(source);
  const auto reader = open();
  const TensorEntry* const step = reader->contents().find_tensor("optim.state.w.step");
  ASSERT_NE(step, nullptr);
  const auto index = static_cast<std::size_t>(step - reader->contents().tensors.data());
  EXPECT_EQ(test::whole_tensor(*reader, index), bytes_of<float>({7}));
}

// Shows F2. In the source, one list has all groups, and one dict all entries of `deepspeed`.
TEST_F(UniversalTest, DictsOfTheOptimizerAreOpened) {
  MemoryCheckpoint source;
  add_weight(source, "w", {2});
  add_value(source, {"optim", "param_groups"},
            Value::List{Value::Dict{{"lr", 0.5}, {"params", Value::List{"w"}}}});
  add_value(source, {"deepspeed"}, Value::Dict{{"global_steps", 12}});
  write(source);
  const auto entries = told(*open("global_step12_universal"));
  EXPECT_EQ(entries.at("optim.param_groups.0.lr"), "0.5");
  EXPECT_EQ(entries.at("optim.param_groups.0.params"), "['w']");
  EXPECT_EQ(entries.at("deepspeed.global_steps"), "12");
  EXPECT_EQ(entries.size(), 4u);
}

/// Returns what the writer notes about the source.
std::vector<std::string> writer_notes(const MemoryCheckpoint& source) {
  const FormatWriter& writer = writer_of(Format("deepspeed"));
  const auto values = [&] { return values_of(source); };
  const FormatWriter::ReadElement read = [&](std::size_t t) -> FormatWriter::Element {
    const Bytes bytes = test::whole_tensor(source, t);
    return {source.contents().tensors[t].meta.dtype,
            std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size())};
  };
  std::vector<std::string> texts;
  for (const Finding& note : writer.notes("run", source.contents(), {}, values, read)) {
    texts.push_back(note.where.fqn + ": " + note.found);
  }
  return texts;
}

// Shows F2, E13. ZeRO stage 3 takes one step for all parameters.
TEST_F(UniversalTest, StepsThatDifferAreNoted) {
  MemoryCheckpoint source = trained();
  EXPECT_THAT(writer_notes(source), IsEmpty());
  EXPECT_THAT(writer_notes(bare_weights()), IsEmpty());
  source.piece_bytes("optim.state.up.weight.step", 0) = bytes_of<float>({5});
  EXPECT_THAT(writer_notes(source),
              ElementsAre("optim.state.up.weight.step: 5.0 (ZeRO stage 3 takes the first step for "
                          "all parameters; stages 1 and 2 stop if steps differ within a group)"));
  MemoryCheckpoint of_values;
  for (const char* const name : {"a", "b"}) {
    add_weight(of_values, name, {2});
    add_value(of_values, {"optim", "state", name, "step"}, *name == 'a' ? Value(2) : Value(5.0));
  }
  EXPECT_THAT(writer_notes(of_values), ElementsAre(HasSubstr("optim.state.b.step: 5.0 (")));
}

// Shows F2, E7. The writer refuses this source; what it notes before must not fail.
TEST_F(UniversalTest, AStepOfSeveralElementsIsNotNoted) {
  MemoryCheckpoint source;
  add_weight(source, "a", {2});
  add_state(source, "a", "step", {2});
  EXPECT_THAT(writer_notes(source), IsEmpty());
}

// Shows F2, E13. Such a parameter has no folder in `zero`.
TEST_F(UniversalTest, ParametersOfAGroupWithoutStateAreNoted) {
  MemoryCheckpoint source;
  for (const char* const name : {"a", "b", "c"}) add_weight(source, name, {2});
  add_value(source, {"optim", "param_groups", 0, "params"}, Value::List{"a", "b", "c"});
  EXPECT_THAT(writer_notes(source), IsEmpty());  // no parameter has state
  add_state(source, "a", "exp_avg", {2});
  EXPECT_THAT(writer_notes(source),
              ElementsAre(": 2 parameters without state, such as 'b' (in the module only, as "
                          "frozen parameters are)"));
}

struct Refused {
  const char* name;
  std::string message;
  std::function<void(MemoryCheckpoint&)> change;
};

// Shows F2, E7.
TEST_F(UniversalTest, WhatDeepSpeedHasNoPlaceForIsRefusedByName) {
  const std::vector<Refused> refused{
      {"slash", "model.a/b: names: expected a name that a folder can have",
       [](auto& source) {
         add_weight(source, "a/b", {1});
         for (const char* const kind : {"exp_avg", "exp_avg_sq", "step"}) {
           add_state(source, "a/b", kind, kind[0] == 's' ? Shape{} : Shape{1});
         }
       }},
      {"long", "names: expected at most 252 bytes",
       [](auto& source) {
         const std::string name(253, 'n');
         add_weight(source, name, {1});
         add_state(source, name, "step", {});
       }},
      {"no weight", "optim.state.other.step: state: expected state of a parameter of the model",
       [](auto& source) { add_state(source, "other", "step", {}); }},
      {"numbers", "optim.state.0.step: optimizer: expected names of parameters, found numbers",
       [](auto& source) { add_state(source, "0", "step", {}); }},
      {"numbers of groups", "optim.param_groups.1.params: optimizer: expected names of parameters",
       [](auto& source) {
         add_value(source, {"optim", "param_groups", 1, "params"}, Value::List{0, 1});
       }},
      {"missing group", "expected group 1 next, found group 3",
       [](auto& source) {
         add_value(source, {"optim", "param_groups", 3, "lr"}, 1.0);
       }},
      {"by row", "optim.state.scale.row: state: expected a tensor of the parameter's shape, []",
       [](auto& source) { add_state(source, "scale", "row", {3}); }},
      {"bits", "optim.state.scale.exp_avg8: state: expected floating-point numbers, found uint8",
       [](auto& source) { add_state(source, "scale", "exp_avg8", {}, DType::uint8); }},
      {"value", "optim.state.scale.mode: state: expected a tensor of the parameter's shape",
       [](auto& source) {
         add_value(source, {"optim", "state", "scale", "mode"}, "fast");
       }},
      {"fp32", "optim.state.scale.fp32: state: expected a name that a file can have",
       [](auto& source) { add_state(source, "scale", "fp32", {}); }},
      {"more",
       "optim.state.up.weight.exp_avg: state: expected exp_avg, exp_avg_sq, max, step, as "
       "'scale' of the same group has, found exp_avg, exp_avg_sq, step",
       [](auto& source) { add_state(source, "scale", "max", {}); }},
      {"integers", "model.seen: dtype: expected floating-point numbers in a parameter",
       [](auto& source) { add_state(source, "seen", "step", {}); }},
      {"member", "param_shapes: names: expected a name that DeepSpeed does not use itself",
       [](auto& source) { add_value(source, {"param_shapes"}, 1); }},
      {"counter", "global_steps: names: expected a name that DeepSpeed does not use itself",
       [](auto& source) { add_value(source, {"global_steps"}, 1); }},
      {"two optimizers", "optim.scheduler.gamma: optimizer: expected optim.state.<fqn>.<name>",
       [](auto& source) {
         add_value(source, {"optim", "scheduler", "gamma"}, 0.5);
       }},
  };
  for (const auto& [name, message, change] : refused) {
    SCOPED_TRACE(name);
    MemoryCheckpoint source = trained();
    change(source);
    EXPECT_THAT([&] { write(source); }, ThrowsError(ErrorKind::unsupported, message));
    EXPECT_TRUE(stdfs::is_empty(tmp_.path()));
  }
}

// Shows F2, E7.
TEST_F(UniversalTest, ACheckpointWithoutAModelIsRefused) {
  MemoryCheckpoint source;
  source.add({"state_dict.w", DType::float32, {1}}, Bytes(4)).key_path = {"state_dict", "w"};
  EXPECT_THAT([&] { write(source); },
              ThrowsError(ErrorKind::unsupported,
                          "weights: expected tensors of a model that is trained, under the key "
                          "'model', found none"));
  // `loss` is no weight of the model.
  source.add({"loss", DType::float32, {}}, Bytes(4)).key_path = {"loss"};
  EXPECT_THAT([&] { write(source); },
              ThrowsError(ErrorKind::unsupported,
                          "state_dict.w: weights: expected tensors of a model that is trained, "
                          "under the key 'model', found this one in another dict, with more "
                          "dimensions than those at the top, such as 'loss'"));
  MemoryCheckpoint cut;
  cut.add({"w", DType::float32, {2}}, Bytes(8), {{Box{{0}, {1}}, 0}, {Box{{1}, {1}}, 1}});
  EXPECT_THAT(
      [&] { create_deepspeed(fs_, path(), cut.contents(), {}); },
      ThrowsError(ErrorKind::invalid_argument, "a universal checkpoint is written unsharded"));
}

// Shows E4.
TEST_F(UniversalTest, EqualInputGivesEqualBytesWhateverTheNumberOfThreads) {
  MemoryCheckpoint source = trained();
  add_weight(source, "wide", {3 << 20});  // three blocks
  for (const char* const kind : {"exp_avg", "exp_avg_sq"}) {
    add_state(source, "wide", kind, {3 << 20});
  }
  add_state(source, "wide", "step", {});
  write(source);
  const auto files = all_files();
  EXPECT_EQ(told(*open()), told(source));
  clear();
  write(source, 4);
  EXPECT_TRUE(all_files() == files);
}

// Shows E4.
TEST_F(UniversalTest, AFailureOfAnyOperationSurfacesAndLeavesNoDestination) {
  write(trained(), 2);
  const auto files = all_files();
  clear();
  for (const auto fault :
       {FaultFileSystem::Fault::short_write, FaultFileSystem::Fault::from_then_on}) {
    FaultFileSystem faulty(fs_, tmp_.path());
    bool has_succeeded = false;
    for (std::int64_t i = 0; !has_succeeded; i += kSampleStep) {
      SCOPED_TRACE("operation " + std::to_string(i));
      ASSERT_LT(i, 2000);
      faulty.fail_operation(i, fault);
      try {
        write(trained(), 2, OverwritePolicy::refuse, &faulty);
        has_succeeded = !faulty.has_failed();
        fs_.remove_all(path() + ".partial.journal");
        EXPECT_TRUE(all_files() == files);
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::io) << error.what();
        if (fault == FaultFileSystem::Fault::short_write) {
          EXPECT_TRUE(stdfs::is_empty(tmp_.path())) << testing::PrintToString(all_names());
        } else if (fs_.kind_of(path())) {
          EXPECT_EQ(told(*open()), told(trained()));
        }
      }
      clear();
    }
  }
}

// Shows E4.
TEST_F(UniversalTest, AFailureWhileReplacingLeavesTheOldOne) {
  const auto old = told(*[&] {
    write(*open_checkpoint(fs_, kValidSources + "zero1"));
    return open();
  }());
  FaultFileSystem faulty(fs_, tmp_.path());
  bool has_succeeded = false;
  for (std::int64_t i = 0; !has_succeeded; i += kSampleStep) {
    SCOPED_TRACE("operation " + std::to_string(i));
    ASSERT_LT(i, 2000);
    faulty.fail_operation(i);
    try {
      write(trained(), 1, OverwritePolicy::replace, &faulty);
      has_succeeded = true;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::io) << error.what();
      EXPECT_EQ(told(*open()), old);
    }
  }
  EXPECT_EQ(told(*open()), told(trained()));
  EXPECT_THAT(fs_.list_directory(path()), ElementsAre(kStepFolder, "latest_universal"));
}

/// Returns whether the transcript of a writer shows that `run` appeared, and that each file and
/// folder in it was synced before.
testing::AssertionResult appears_synced(const std::string& operations) {
  std::set<std::string> unsynced;
  bool has_appeared = false;
  std::istringstream transcript(operations);
  for (std::string line; std::getline(transcript, line);) {
    std::istringstream words(line);
    std::string operation;
    std::string name;
    words >> operation >> name;
    if (operation == "create" || operation == "write" || operation == "resize")
      unsynced.insert(name);
    if (operation == "create" || operation == "make_directory") unsynced.insert(directory_of(name));
    if (operation == "sync" || operation == "sync_directory") unsynced.erase(name);
    if (operation != "rename") continue;
    has_appeared = true;
    for (const std::string& left : unsynced) {
      if (left.starts_with("run.partial/") || left == "run.partial") {
        return testing::AssertionFailure() << left << " was not synced";
      }
    }
  }
  return has_appeared ? testing::AssertionSuccess()
                      : testing::AssertionFailure() << "nothing appeared";
}

// Shows E4.
TEST_F(UniversalTest, EverythingIsSyncedBeforeItAppears) {
  for (const MemoryCheckpoint& source : {trained(), many_parameters()}) {
    FaultFileSystem watched(fs_, tmp_.path());
    write(source, 2, OverwritePolicy::refuse, &watched);
    EXPECT_TRUE(appears_synced(watched.transcript()));
    clear();
  }
}

// Shows E4. There are so many files that other threads sync them.
TEST_F(UniversalTest, AFailureAmongManyFilesLeavesNoDestination) {
  // Of the last operations, some come after the checkpoint is durable. Their failures are no
  // errors.
  constexpr std::int64_t kNumLastOperations = 20;
  constexpr std::int64_t kStep = 151;  // a prime, so that operations of each kind fail
  const MemoryCheckpoint source = many_parameters();
  FaultFileSystem faulty(fs_, tmp_.path());
  write(source, 2, OverwritePolicy::refuse, &faulty);
  const std::int64_t num_operations = faulty.num_operations();
  const auto files = all_files();
  EXPECT_GT(files.size(), 100u);
  clear();
  for (std::int64_t failing = 0; failing < num_operations - kNumLastOperations; failing += kStep) {
    SCOPED_TRACE(failing);
    faulty.fail_operation(failing);
    try {
      write(source, 2, OverwritePolicy::refuse, &faulty);
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::io) << error.what();
    }
    EXPECT_TRUE(stdfs::is_empty(tmp_.path())) << testing::PrintToString(all_names());
  }
}

// Shows E4.
TEST_F(UniversalTest, InterruptedWorkIsResumedAndTheFilesAreTheSame) {
  const MemoryCheckpoint source = in_memory(trained());
  write(source);
  const auto expected = all_files();
  clear();
  CreateOptions options{.format = Format("deepspeed")};
  options.journal = JournalOptions{.identity = {{"source", "trained"}}};
  const auto start = [&] {
    return create_checkpoint(fs_, path(), source.contents(), values_of(source), options);
  };
  {
    const auto writer = start();
    const auto order = writer->write_order();
    for (std::size_t i = 0; i < order.size() - 2; ++i) {
      const std::size_t tensor = order[i].tensor_index;
      writer->write_block(order[i], 0, test::whole_tensor(source, tensor));
    }
    EXPECT_TRUE(writer->keep_work());
  }
  options.journal->kept_work = KeptWork::resume;
  {
    const auto writer = start();
    EXPECT_TRUE(writer->is_resumed());
    std::size_t num_resumed = 0;
    for (const auto id : writer->write_order()) {
      Bytes bytes = test::whole_tensor(source, id.tensor_index);
      if (writer->resume_block(id, 0, bytes)) {
        ++num_resumed;
        EXPECT_EQ(bytes, test::whole_tensor(source, id.tensor_index));
      } else {
        writer->write_block(id, 0, bytes);
      }
    }
    EXPECT_EQ(num_resumed, writer->write_order().size() - 2);
    writer->commit();
  }
  EXPECT_TRUE(all_files() == expected);
}

// Shows E4. A file that is no part of the checkpoint, also deep within its folders.
TEST_F(UniversalTest, AFileOfOthersIsNotReplaced) {
  for (const std::string& name : {kStepFolder + "/notes.txt", kZero + "/up.weight/notes.txt",
                                  kZero + "/up.weight/fp32.pt/deep.pt", std::string("mine/a.pt")}) {
    SCOPED_TRACE(name);
    write(trained());
    stdfs::remove_all(path(directory_of(name).ends_with(".pt") ? directory_of(name) : "none"));
    stdfs::create_directories(path(directory_of(name)));
    std::ofstream(path(name)) << "mine";
    EXPECT_THAT([&] { check_destination(fs_, "memory", path(), OverwritePolicy::replace, "o"); },
                ThrowsError(ErrorKind::invalid_argument, "'" + name.substr(0, name.find("/a.pt"))));
    EXPECT_TRUE(stdfs::exists(path(name)));
    clear();
  }
  write(trained());
  std::ofstream(path(kZero + "/scale/fp32.pt")) << "no archive";
  EXPECT_THAT([&] { check_destination(fs_, "memory", path(), OverwritePolicy::replace, "o"); },
              ThrowsError(ErrorKind::invalid_argument, "expected a file that torch.save wrote"));
}

// Shows E4.
TEST_F(UniversalTest, AFileThatAppearsInTheWorkIsRefusedAndStays) {
  const MemoryCheckpoint source = in_memory(trained());
  {
    const auto writer = create_deepspeed(fs_, path(), source.contents(), values_of(source));
    std::ofstream(path() + ".partial/" + kZero + "/scale/mine.pt") << "mine";
    EXPECT_THAT([&] { test::copy_checkpoint(source, *writer); },
                ThrowsError(ErrorKind::already_exists, "does not belong to the checkpoint"));
  }
  EXPECT_FALSE(fs_.kind_of(path()));
  EXPECT_TRUE(fs_.kind_of(path() + ".partial/" + kZero + "/scale/mine.pt"));
}

// Reading

// Shows F2. If a run has both files, the step that `latest` names is read.
TEST_F(UniversalTest, LatestComesBeforeLatestUniversal) {
  stdfs::copy(kValidSources + "zero3", path(), stdfs::copy_options::recursive);
  stdfs::permissions(path(), stdfs::perms::owner_all);
  const auto of_run = told(*open());
  test::TemporaryDirectory other;
  const MemoryCheckpoint source = in_memory(trained());
  test::copy_checkpoint(
      source, *create_deepspeed(fs_, other / "run", source.contents(), values_of(source)));
  stdfs::copy(other / "run", path(), stdfs::copy_options::recursive);
  EXPECT_EQ(told(*open()), of_run);
  EXPECT_EQ(told(*open(kStepFolder)), told(source));
}

// Shows F2, E4.
TEST_F(UniversalTest, ItsFilesAreThoseOfDeepSpeed) {
  write(trained());
  const FormatDriver& driver = driver_of(Format("deepspeed"));
  EXPECT_THAT(driver.own_files(fs_, path(), fs_.list_directory(path()), {}),
              ElementsAre(kStepFolder, "latest_universal"));
  EXPECT_THAT(driver.own_files(fs_, path(kStepFolder), fs_.list_directory(path(kStepFolder)), {}),
              ElementsAre("mp_rank_00_model_states.pt", "zero",
                          "zero_pp_rank_0_mp_rank_00_model_states.pt"));
  EXPECT_TRUE(driver.is_one_of_several(fs_, path(kStepFolder + "/mp_rank_00_model_states.pt")));
  EXPECT_TRUE(driver.writes_file(kZero + "/up.weight/exp_avg.pt"));
  for (const char* const name :
       {"up.weight/exp_avg.pt", "zero/up.weight/fp32.pt", "a.pt", "global_step0/zero/w/fp32.pt",
        "global_step0_universal/zero/w/x/fp32.pt", "global_step0_universal/zero/w/fp32.txt",
        "global_step0_universal/other.pt"}) {
    EXPECT_FALSE(driver.writes_file(name)) << name;
  }
  const auto reader = open();
  EXPECT_EQ(reader->data_files().size(), 10u);
  EXPECT_EQ(reader->piece_storage(0, 0).file, kZero + "/scale/fp32.pt");
  EXPECT_EQ(reader->contents().world_size, 1);
}

class UniversalDamageTest : public UniversalTest {
 protected:
  void SetUp() override { write(trained()); }

  void put(const std::string& name, const std::string& bytes) const {
    std::ofstream(path(name), std::ios::binary) << bytes;
  }
  /// Writes the `torch.save` file of a value.
  void put_value(const std::string& name, const Value& value) const {
    put(name, torch_zip::torch_save_value(value));
  }
};

// Shows F2, E7.
TEST_F(UniversalDamageTest, WhatIsMissingOrOfAnotherSizeIsRefusedByName) {
  using Change = std::function<void()>;
  const std::vector<std::tuple<const char*, std::string, Change>> changes{
      {"weights",
       kStepFolder +
           ": up.weight: files of parameters: expected zero/up.weight/fp32.pt, found none",
       [&] { stdfs::remove(path(kZero + "/up.weight/fp32.pt")); }},
      {"moment",
       kStepFolder +
           ": scale: files of parameters: expected zero/scale/exp_avg.pt, as 'up.weight' of "
           "the same group has, found none",
       [&] { stdfs::remove(path(kZero + "/scale/exp_avg.pt")); }},
      {"step", "scale: files of parameters: expected zero/scale/step.pt, as 'up.weight' of",
       [&] { stdfs::remove(path(kZero + "/scale/step.pt")); }},
      {"all state", "scale: files of parameters: expected zero/scale/exp_avg.pt, as 'up.weight' of",
       [&] {
         for (const char* const kind : {"exp_avg", "exp_avg_sq", "step"}) {
           stdfs::remove(path(kZero + "/scale/" + kind + ".pt"));
         }
       }},
      {"model states",
       kStepFolder +
           ": files of ranks: expected mp_rank_00_model_states.pt, which has the buffers and "
           "frozen parameters, found none",
       [&] { stdfs::remove(path(kStepFolder + "/mp_rank_00_model_states.pt")); }},
      {"transposed",
       "up.weight: files of parameters: expected a tensor of the shape in param_shapes, "
       "[2, 3], or of one dimension, found [3, 2]",
       [&] {
         put_value(kStepFolder + "/mp_rank_00_model_states.pt",
                   Value::Dict{{"module", Value::Dict{}},
                               {"param_shapes",
                                Value::List{Value::Dict{{"scale", Value::Tuple{{}}},
                                                        {"up.weight", Value::Tuple{{2, 3}}}}}}});
       }},
      {"folder", "scale: files of parameters: expected zero/scale/fp32.pt, found none",
       [&] { stdfs::remove_all(path(kZero + "/scale")); }},
      {"size",
       "scale/exp_avg.pt: scale: files of parameters: expected a tensor of 1 elements, for "
       "[], found [3, 2]",
       [&] {
         stdfs::copy_file(path(kZero + "/up.weight/exp_avg.pt"), path(kZero + "/scale/exp_avg.pt"),
                          stdfs::copy_options::overwrite_existing);
       }},
      {"no tensor",
       "fp32.pt: up.weight: files of parameters: expected a tensor of 6 elements, for "
       "[3, 2], found none",
       [&] {
         put_value(kZero + "/up.weight/fp32.pt", Value::Dict{{"param", 3}});
       }},
      {"step", "step: expected a number, found another kind of value",
       [&] { put_value(kZero + "/up.weight/step.pt", "seven"); }},
      {"another",
       kZero + "/other: files of parameters: expected the name of a parameter in "
               "mp_rank_00_model_states.pt",
       [&] { stdfs::copy(path(kZero + "/scale"), path(kZero + "/other")); }},
      {"groups", "optimizer_state.pt", [&] { stdfs::remove(path(kZero + "/optimizer_state.pt")); }},
      {"truncated", "exp_avg.pt",
       [&] { stdfs::resize_file(path(kZero + "/up.weight/exp_avg.pt"), 700); }},
      {"empty", "fp32.pt", [&] { stdfs::resize_file(path(kZero + "/up.weight/fp32.pt"), 0); }},
      {"latest", "latest_universal: latest: expected the name of a folder beside it, found '..'",
       [&] { put("latest_universal", ".."); }},
      {"tensor parallel", "mp_rank_01_model_states.pt",
       [&] { put(kStepFolder + "/mp_rank_01_model_states.pt", ""); }},
      {"link", "fp32.pt: link: expected a target inside the checkpoint",
       [&] {
         stdfs::rename(path(kZero + "/scale/fp32.pt"), tmp_ / "fp32.pt");
         stdfs::create_symlink(tmp_ / "fp32.pt", path(kZero + "/scale/fp32.pt"));
       }},
      {"link of a folder", "link: expected a target inside the checkpoint",
       [&] {
         stdfs::rename(path(kZero + "/scale"), tmp_ / "scale");
         stdfs::create_symlink(tmp_ / "scale", path(kZero + "/scale"));
       }},
      {"climbing name", "param_shapes: expected a name that a folder can have",
       [&] {
         put_value(kStepFolder + "/mp_rank_00_model_states.pt",
                   Value::Dict{{"param_shapes",
                                Value::List{Value::Dict{{"../../up", Value::Tuple{{2}}}}}}});
       }},
      {"no shapes", "param_shapes: expected the shapes of the parameters, found none",
       [&] {
         put_value(kStepFolder + "/mp_rank_00_model_states.pt",
                   Value::Dict{{"module", Value::Dict{}}});
       }},
  };
  for (const auto& [name, message, change] : changes) {
    SCOPED_TRACE(name);
    change();
    EXPECT_THAT([&] { open(); },
                testing::Throws<Error>(testing::AllOf(
                    testing::Property(&Error::kind,
                                      testing::AnyOf(ErrorKind::corruption, ErrorKind::unsupported,
                                                     ErrorKind::not_found)),
                    testing::Property(&Error::what, HasSubstr(message)))));
    clear();
    write(trained());
  }
}

/// A member of what Tessera's writer adds, and what the message says if it has this value.
struct DamagedMember {
  const char* member;
  Value value;
  std::string message;
};

// Shows F2, E7.
TEST_F(UniversalDamageTest, ADamagedMemberOfTesseraIsRefusedByName) {
  const std::vector<DamagedMember> members{
      {"order", Value::List{5, "nope"}, ".order: expected names, found 5"},
      {"order", "all", ".order: expected a list of plain values, found 'all'"},
      {"order", Value::List{"optim.state.scale.max"},
       "scale: files of parameters: expected zero/scale/max.pt, which 'tessera' in "
       "zero/optimizer_state.pt lists, found none"},
      {"neutral", "all", ".neutral: expected a list of plain values, found 'all'"},
      {"paths", "all", ".paths: expected a list of plain values, found 'all'"},
      {"paths", Value::List{1.5}, ".paths: expected key paths, found 1.5"},
      {"groups", Value::List{3}, ".groups: expected a list of names for each group, found 3"},
      {"groups", Value::List{Value::List{3}}, ".groups: expected names, found 3"},
      {"groups", Value::List{},
       ".groups: expected names of group 0, which has fields, found names of 0 groups"},
  };
  const Value groups = Value::List{Value::Dict{{"lr", 0.5}, {"params", Value::List{0}}},
                                   Value::Dict{{"params", Value::List{1}}}};
  const auto with = [&](Value tessera) {
    return Value::Dict{{"param_groups", groups}, {"tessera", std::move(tessera)}};
  };
  const Value names = Value::List{Value::List{"up.weight", "scale"}};
  const auto put_members = [&](const Value& members_of_file) {
    put_value(kZero + "/optimizer_state.pt", members_of_file);
  };
  put_members(with(Value::Dict{{"groups", names}}));
  EXPECT_EQ(told(*open()).at("optim.param_groups.0.params"), "['up.weight', 'scale']");
  for (const DamagedMember& damaged : members) {
    SCOPED_TRACE(damaged.message);
    Value::Dict tessera;
    if (std::string_view(damaged.member) != "groups") tessera.emplace_back("groups", names);
    tessera.emplace_back(damaged.member, damaged.value);
    put_members(with(std::move(tessera)));
    const bool is_of_state = damaged.message.starts_with("scale");
    const std::string front = is_of_state ? kStepFolder + ": " : "optimizer_state.pt: tessera";
    EXPECT_THAT([&] { open(); }, ThrowsError(ErrorKind::corruption, front + damaged.message));
  }
  put_members(with(Value::Dict{{"order", Value::List{}}}));
  EXPECT_THAT([&] { open(); },
              ThrowsError(ErrorKind::corruption,
                          "tessera.groups: expected a list of names for each group, found none"));
  put_members(with(3));
  EXPECT_THAT([&] { open(); },
              ThrowsError(ErrorKind::corruption, "tessera: expected a dict with items, found"));
}

// Shows E3. No code of a pickle runs, and objects of other classes are no tensors.
TEST_F(UniversalDamageTest, AHostilePickleIsRefused) {
  pickle::Pickler pickler(2);
  pickler.global("os", "system");
  pickler.text("touch " + (tmp_ / "was_run"));
  pickler.tuple1();
  pickler.reduce();
  const torch_zip::TorchSaveLayout archive(std::move(pickler).finish(), {});
  const std::string hostile = archive.segments_around_storages({}).front().bytes;
  for (const char* const file : {"/fp32.pt", "/exp_avg.pt", "/step.pt"}) {
    put(kZero + "/up.weight" + file, hostile);
    EXPECT_THAT([&] { open(); }, ThrowsError(ErrorKind::corruption, file)) << file;
    clear();
    write(trained());
  }
  put(kZero + "/optimizer_state.pt", hostile);
  EXPECT_ANY_THROW({
    const auto reader = open();
    values_of(*reader);
  });
  EXPECT_FALSE(stdfs::exists(tmp_ / "was_run"));
}

// Shows E3. A flipped bit is found where it is read and by verify.
TEST_F(UniversalDamageTest, AFlippedBitIsFound) {
  const auto storage = open()->piece_storage(0, 0);
  std::fstream file(path(storage.file), std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(static_cast<std::streamoff>(storage.byte_range->begin));
  file.put('\1');
  file.close();
  const auto reader = open();
  std::vector<std::string> found;
  reader->verify([&](const Finding& finding) { found.push_back(finding.where.path); },
                 [](std::uint64_t) {});
  EXPECT_THAT(found, ElementsAre(path(storage.file)));
}

// Shows E7.
TEST_F(UniversalDamageTest, AFileThatChangesAfterOpeningIsFoundWhenItIsRead) {
  const auto reader = open();
  stdfs::copy_file(path(kZero + "/up.weight/fp32.pt"), path(kZero + "/scale/fp32.pt"),
                   stdfs::copy_options::overwrite_existing);
  EXPECT_EQ(reader->contents().tensors[0].meta.fqn, "model.scale");
  EXPECT_THAT([&] { test::whole_tensor(*reader, 0); },
              ThrowsError(ErrorKind::corruption, "the tensor that was there"));
}

// Shows E3. Thousands of files are opened one after the other, only few at the same time.
TEST_F(UniversalTest, ManyParametersNeedFewOpenFiles) {
  MemoryCheckpoint source;
  constexpr int kNumParameters = 600;
  for (int i = 0; i < kNumParameters; ++i) {
    const std::string name = "layers." + std::to_string(i) + ".weight";
    add_weight(source, name, {2}, static_cast<float>(i));
    for (const char* const kind : {"exp_avg", "exp_avg_sq"}) add_state(source, name, kind, {2});
    add_state(source, name, "step", {});
  }
  const auto num_open = [] {
    return std::distance(stdfs::directory_iterator("/proc/self/fd"), stdfs::directory_iterator());
  };
  FaultFileSystem without_syncs(fs_, tmp_.path());
  write(source, 2, OverwritePolicy::refuse, &without_syncs);
  const auto before = num_open();
  const auto reader = open();
  EXPECT_EQ(told(*reader), told(source));
  EXPECT_LE(num_open() - before, 130);
}

}  // namespace
}  // namespace tessera::formats
