#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <string>
#include <vector>

#include "formats/native_checkpoint.h"
#include "support/error_matchers.h"
#include "support/temporary_directory.h"
#include "tessera/formats/detect.h"
#include "tessera/reshard/executor.h"

namespace tessera::reshard {
namespace {

using formats::Format;
using formats::MergePreference;
using test::files_of;
using test::MemoryCheckpoint;
using test::TemporaryDirectory;
using test::ThrowsError;
using test::write_file;
using FileNames = std::vector<std::string>;

class ExtraFilesTest : public ::testing::Test {
 protected:
  ExtraFilesTest() { write("source", Format::native); }

  void write(const std::string& name, Format format) {
    MemoryCheckpoint memory;
    memory.add({"w", DType::float32, {2}}, test::bytes_of<float>({1, 2}));
    const auto writer =
        formats::create_checkpoint(fs_, tmp_ / name, memory.contents(), {}, {.format = format});
    test::write_all(memory, *writer);
  }

  ExtraFilesPlan plan(const ExtraFilesOptions& options = {}, Format format = Format::native,
                      const FileNames& sources = {"source"}, const std::string& to = "moved") {
    FileNames paths;
    for (const std::string& source : sources) paths.push_back(tmp_ / source);
    const auto reader = formats::open_checkpoint(fs_, paths.front());
    const Plan move =
        plan_reshard(reader->contents(), reader->path(), {.format = format, .cast = cast_});
    return plan_extra_files(fs_, move, *reader, paths, tmp_ / to, format, options);
  }

  /// Returns the files that are not copied, each as `name: why`.
  static FileNames left(const ExtraFilesPlan& plan) {
    FileNames lines;
    for (const auto& [name, why] : plan.left) lines.push_back(name + ": " + why);
    return lines;
  }
  static FileNames carried(const ExtraFilesPlan& plan) {
    FileNames names;
    for (const auto& file : plan.carried) names.push_back(file.name);
    return names;
  }

  FileSystem& fs_ = FileSystem::posix();
  TemporaryDirectory tmp_;
  std::optional<DType> cast_;
};

TEST_F(ExtraFilesTest, OrdinaryFilesAreCarriedAndTheOthersAreNamed) {
  write_file(tmp_ / "source/config.json", "{}");
  write_file(tmp_ / "source/.hidden", "");
  fs_.make_directory(tmp_ / "source/folder");
  write_file(tmp_ / "source/folder/within", "");
  std::filesystem::create_symlink("config.json", tmp_ / "source/link");
  std::filesystem::create_symlink("nowhere", tmp_ / "source/link.to.nowhere");
  ASSERT_EQ(::mkfifo((tmp_ / "source/pipe").c_str(), 0600), 0);
  for (const char* name : {".metadata", "model.safetensors", "x.distcp", "rank-x.h5"}) {
    write_file(tmp_ / ("source/" + std::string(name)), "");
  }
  const ExtraFilesPlan found = plan();
  EXPECT_EQ(carried(found), (FileNames{".hidden", "config.json"}));
  const std::string checkpoint = ": looks like a checkpoint file";
  EXPECT_EQ(left(found), (FileNames{".metadata" + checkpoint, "folder: a folder", "link: a link",
                                    "link.to.nowhere: a link", "model.safetensors" + checkpoint,
                                    "pipe: not a regular file", "rank-x.h5" + checkpoint,
                                    "x.distcp" + checkpoint}));
}

TEST_F(ExtraFilesTest, WhatTesserasWritersLeftIsNotCarried) {
  write_file(tmp_ / "source/index.h5.partial", "");
  write_file(tmp_ / "source/model.safetensors.values.json.partial.old", "");
  write_file(tmp_ / "source/other.partial", "");
  write_file(tmp_ / "source/other.partial.old", "");
  write_file(tmp_ / "source/other.partial.journal", "tessera-journal 1\n");
  EXPECT_EQ(carried(plan()), FileNames{});
  EXPECT_EQ(left(plan()),
            (FileNames{"index.h5.partial: has the name of a checkpoint file, but the checkpoint "
                       "does not list it",
                       "model.safetensors.values.json.partial.old: looks like a checkpoint file"}));
  write_file(tmp_ / "source/notes.partial", "");
  write_file(tmp_ / "source/notes.partial.journal", "my journal");
  EXPECT_EQ(carried(plan()), (FileNames{"notes.partial", "notes.partial.journal"}));
}

TEST_F(ExtraFilesTest, TheMarkOfAnIncompleteCheckpointIsNotCarried) {
  fs_.make_directory(tmp_ / "others");
  write_file(tmp_ / "others/.tessera-incomplete", "");
  write_file(tmp_ / "others/config.json", "{}");
  const ExtraFilesPlan found = plan({.folder = tmp_ / "others"});
  EXPECT_EQ(carried(found), FileNames{"config.json"});
  EXPECT_EQ(left(found), FileNames{".tessera-incomplete: marks an incomplete checkpoint"});
}

TEST_F(ExtraFilesTest, TheLargestAreLeftBeyondTheLimit) {
  write_file(tmp_ / "source/a", "1234");
  write_file(tmp_ / "source/b", "1");
  write_file(tmp_ / "source/c", "12");
  EXPECT_EQ(carried(plan({.max_nbytes = 7})), (FileNames{"a", "b", "c"}));
  EXPECT_EQ(carried(plan({.max_nbytes = 6})), (FileNames{"b", "c"}));
  EXPECT_EQ(left(plan({.max_nbytes = 6})),
            FileNames{"a: 4 bytes, over the limit of 6 bytes for all"});
  EXPECT_EQ(carried(plan({.max_nbytes = 0})), FileNames{});
}

TEST_F(ExtraFilesTest, ASingleFileTakesNone) {
  write_file(tmp_ / "source/a", "1");
  const auto found = plan({}, Format::torch_zip, {"source"}, "moved.pt");
  EXPECT_EQ(carried(found), FileNames{});
  EXPECT_EQ(left(found), FileNames{"a: the destination is a single file"});
}

TEST_F(ExtraFilesTest, ASingleFileHasNone) {
  write("model.pt", Format::torch_zip);
  write_file(tmp_ / "config.json", "{}");
  const auto found = plan({}, Format::native, {"model.pt"});
  EXPECT_EQ(carried(found), FileNames{});
  EXPECT_EQ(left(found), FileNames{});
}

TEST_F(ExtraFilesTest, ANameThatTheWriterNeedsIsAProblem) {
  write_file(tmp_ / "source/.metadata", "mine");
  const auto found = plan({}, Format::dcp);
  ASSERT_EQ(found.problems.size(), 1U);
  EXPECT_EQ(found.problems[0].where.path, tmp_ / "source/.metadata");
  EXPECT_TRUE(found.problems[0].remedy == Remedy{Remedy::Action::leave_extra_files});
  EXPECT_THAT(plan({.policy = ExtraFilesPolicy::leave}, Format::dcp).problems,
              ::testing::IsEmpty());
}

TEST_F(ExtraFilesTest, ANameThatWouldMisleadTheReaderIsLeft) {
  for (const char* name : {"latest", "metadata.pkl", "adapter_model.bin"}) {
    write_file(tmp_ / ("source/" + std::string(name)), "mine");
  }
  const std::string adapter = "adapter_model.bin: looks like a checkpoint file";
  EXPECT_EQ(left(plan({}, Format("deepspeed"))),
            (FileNames{adapter, "latest: looks like a checkpoint file"}));
  EXPECT_EQ(left(plan({}, Format("rank_files"))),
            (FileNames{adapter, "metadata.pkl: looks like a checkpoint file"}));
  EXPECT_EQ(left(plan()), FileNames{adapter});
  EXPECT_EQ(carried(plan()), (FileNames{"latest", "metadata.pkl"}));
}

TEST_F(ExtraFilesTest, AFileThatNamesAFolderIsLeft) {
  fs_.make_directory(tmp_ / "source/global_step5");
  write_file(tmp_ / "source/latest", "global_step5\n");
  const auto found = plan();
  EXPECT_EQ(left(found),
            (FileNames{"global_step5: a folder", "latest: names a folder, which is not copied"}));
  write_file(tmp_ / "source/latest", "global_step6\n");
  EXPECT_EQ(carried(plan()), FileNames{"latest"});
}

TEST_F(ExtraFilesTest, MegatronsFilesAreLeftWhereARecipeMadeOtherTensors) {
  write_file(tmp_ / "source/common.pt", "pickle");
  write_file(tmp_ / "source/metadata.json", R"({"sharded_backend": "torch_dist"})");
  const FileNames both{"common.pt", "metadata.json"};
  const std::string why = ": describes Megatron's tensors, which a recipe changed";
  EXPECT_EQ(left(plan({.is_converted = true}, Format::safetensors)),
            (FileNames{both[0] + why, both[1] + why}));
  EXPECT_EQ(carried(plan({.is_converted = true}, Format::dcp)), both);
  EXPECT_EQ(carried(plan({}, Format::safetensors)), both);
  write_file(tmp_ / "source/metadata.json", "{}");
  EXPECT_EQ(carried(plan({.is_converted = true}, Format::safetensors)), both);
}

// A trainer would resume from them, or a loader would take them, instead of the new weights.
TEST_F(ExtraFilesTest, FilesWithTensorsAreLeftIfTheTensorsChange) {
  const FileNames resumed{"consolidated.00.pth",
                          "diffusion_pytorch_model.bin",
                          "flax_model.msgpack",
                          "model-q4.gguf",
                          "model.bin",
                          "model.ckpt",
                          "model.npz",
                          "model.onnx",
                          "model.onnx_data",
                          "model.pt",
                          "model.pth",
                          "open_clip_pytorch_model.bin",
                          "optimizer.bin",
                          "optimizer.pt",
                          "optimizer.pth",
                          "optimizer_state.pt",
                          "pytorch_model.pt",
                          "pytorch_model_1.bin",
                          "pytorch_model_fsdp.bin",
                          "pytorch_model_fsdp_1.bin",
                          "tf_model.h5",
                          "weights.npz"};
  for (const std::string& name : resumed) write_file(tmp_ / ("source/" + name), "mine");
  write_file(tmp_ / "source/scheduler.bin", "mine");
  FileNames all = resumed;
  all.insert(all.end() - 2, "scheduler.bin");  // by name
  EXPECT_EQ(carried(plan()), all);
  FileNames lines;
  for (const std::string& name : resumed) {
    lines.push_back(name + ": belongs to the tensors before the change");
  }
  for (const ExtraFilesOptions& options :
       {ExtraFilesOptions{.changes_tensors = true}, ExtraFilesOptions{.is_converted = true},
        ExtraFilesOptions{.removes_quantization = true}}) {
    EXPECT_EQ(left(plan(options)), lines);
    EXPECT_EQ(carried(plan(options)), FileNames{"scheduler.bin"});
  }
  cast_ = DType::bfloat16;
  EXPECT_EQ(left(plan()), lines);
}

TEST_F(ExtraFilesTest, FilesWithAllTensorsAreLeftIfOnlySomeMove) {
  MemoryCheckpoint memory;
  memory.add({"v", DType::float32, {1}}, test::bytes_of<float>({1}));
  memory.add({"w", DType::float32, {1}}, test::bytes_of<float>({2}));
  const auto writer = formats::create_checkpoint(fs_, tmp_ / "two", memory.contents(), {},
                                                 {.format = Format::native});
  test::write_all(memory, *writer);
  write_file(tmp_ / "two/optimizer.pt", "mine");
  const auto left_by = [&](const char* pattern) {
    const auto reader = formats::open_checkpoint(fs_, tmp_ / "two");
    const Plan move =
        plan_reshard(reader->contents(), reader->path(), {.only = NameSelection({pattern})});
    return left(
        plan_extra_files(fs_, move, *reader, {tmp_ / "two"}, tmp_ / "moved", Format::native, {}));
  };
  EXPECT_EQ(left_by("w"), FileNames{"optimizer.pt: belongs to the tensors before the change"});
  EXPECT_EQ(left_by("*"), FileNames{});
}

TEST_F(ExtraFilesTest, RefusalNamesAll) {
  const ExtraFilesOptions refuse{.policy = ExtraFilesPolicy::refuse};
  EXPECT_THAT(plan(refuse).problems, ::testing::IsEmpty());
  write_file(tmp_ / "source/a", "");
  fs_.make_directory(tmp_ / "source/folder");
  const auto found = plan(refuse);
  ASSERT_EQ(found.problems.size(), 1U);
  EXPECT_EQ(found.problems[0].found, "2: a, folder");
}

TEST_F(ExtraFilesTest, AnotherFolderTakesTheirPlace) {
  write_file(tmp_ / "source/a", "1");
  write_file(tmp_ / "source/equal", "1");
  fs_.make_directory(tmp_ / "model");
  write_file(tmp_ / "model/a", "2");
  write_file(tmp_ / "model/b", "");
  write_file(tmp_ / "model/equal", "1");
  write_file(tmp_ / "model/model.safetensors", "");
  const auto found = plan({.folder = tmp_ / "model"});
  EXPECT_EQ(carried(found), (FileNames{"a", "b", "equal"}));
  EXPECT_EQ(found.carried[0].path, tmp_ / "model/a");
  EXPECT_EQ(left(found), FileNames{"a: another folder is given"});
  EXPECT_THAT(
      [&] { plan({.folder = tmp_ / "model/a"}); },
      ThrowsError(ErrorKind::invalid_argument, "a folder that contains extra files, found a file"));
  EXPECT_THAT([&] { plan({.folder = tmp_ / "nowhere"}); },
              ThrowsError(ErrorKind::not_found, "nowhere: extra files: "));
}

TEST_F(ExtraFilesTest, WeightsInAnotherFolderAreNeverCarried) {
  fs_.make_directory(tmp_ / "model");
  const FileNames names{
      "consolidated.00.pth", "flax_model.msgpack", "model.onnx", "optimizer.pt", "q4.gguf",
      "tf_model.h5"};
  for (const std::string& name : names) write_file(tmp_ / ("model/" + name), "");
  write_file(tmp_ / "model/config.json", "{}");
  const auto found = plan({.folder = tmp_ / "model"});
  EXPECT_EQ(carried(found), FileNames{"config.json"});
  FileNames lines;
  for (const std::string& name : names) {
    lines.push_back(name + ": holds the tensors of the model in that folder");
  }
  EXPECT_EQ(left(found), lines);
}

// The Trainer of transformers saves it beside the model.
TEST_F(ExtraFilesTest, AFolderWithACheckpointOfDeepSpeedIsNamedAsOne) {
  fs_.make_directory(tmp_ / "source/global_step2");
  write_file(tmp_ / "source/latest", "global_step2");
  for (const char* const name :
       {"mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"}) {
    write_file(tmp_ / ("source/global_step2/" + std::string(name)), "");
  }
  EXPECT_EQ(left(plan()).front(),
            "global_step2: a DeepSpeed checkpoint, with the float32 weights and the state of the "
            "optimizer; to move it, give its path as the source");
}

TEST_F(ExtraFilesTest, AMergeTakesWhatItsSourcesAgreeOn) {
  write("other", Format::safetensors);
  for (const std::string name : {"source", "other"}) {
    write_file(tmp_ / (name + "/equal"), "1");
    write_file(tmp_ / (name + "/differs"), name);
    write_file(tmp_ / (name + "/only_" + name), "");
  }
  const auto with = [&](MergePreference preference) {
    return plan({.preference = preference}, Format::native, {"source", "other"});
  };
  EXPECT_EQ(carried(with(MergePreference::none)),
            (FileNames{"equal", "only_other", "only_source"}));
  EXPECT_EQ(left(with(MergePreference::none)), FileNames{"differs: differs between the sources"});
  EXPECT_EQ(with(MergePreference::first).carried.at(0).path, tmp_ / "source/differs");
  EXPECT_EQ(with(MergePreference::last).carried.at(0).path, tmp_ / "other/differs");
  EXPECT_TRUE(with(MergePreference::none).notes.empty());
  ASSERT_EQ(with(MergePreference::last).notes.size(), 1U);
  EXPECT_EQ(with(MergePreference::first).notes.at(0).found,
            "different files (the file of the first source is copied): 'differs'");
  EXPECT_EQ(with(MergePreference::last).notes.at(0).found,
            "different files (the file of the last source is copied): 'differs'");
}

TEST_F(ExtraFilesTest, SafetensorsThatTheIndexDoesNotNameAreExtra) {
  write("shards", Format::safetensors);
  const std::string model = tmp_ / "shards/model.safetensors";
  fs_.rename(model, tmp_ / "shards/model-00001-of-00001.safetensors");
  write_file(tmp_ / "shards/adapter_model.safetensors", "x");
  write_file(tmp_ / "shards/model.safetensors.index.json",
             R"({"metadata": {}, "weight_map": {"w": "model-00001-of-00001.safetensors"}})");
  EXPECT_EQ(left(plan({}, Format::native, {"shards"})),
            FileNames{"adapter_model.safetensors: has the name of a checkpoint file, but the "
                      "checkpoint does not list it"});
}

TEST_F(ExtraFilesTest, AFolderWithShardsOfTheIndexIsNoExtraEntry) {
  write("shards", Format::safetensors);
  fs_.make_directory(tmp_ / "shards/below");
  fs_.rename(tmp_ / "shards/model.safetensors", tmp_ / "shards/below/model.safetensors");
  write_file(tmp_ / "shards/model.safetensors.index.json",
             R"({"metadata": {}, "weight_map": {"w": "below/model.safetensors"}})");
  write_file(tmp_ / "shards/below/notes.txt", "x");
  fs_.make_directory(tmp_ / "shards/below2");
  const ExtraFilesPlan found = plan({}, Format::native, {"shards"});
  EXPECT_EQ(left(found), FileNames{"below2: a folder"});
  EXPECT_EQ(carried(found), FileNames{"notes.txt"});
}

TEST_F(ExtraFilesTest, AnIndexWhoseShardsAreNotCopiedIsLeft) {
  const std::string variant = "diffusion_pytorch_model.safetensors.index.fp16.json";
  write_file(tmp_ / ("source/" + variant), R"({"weight_map": {"w": "a.fp16.safetensors"}})");
  write_file(tmp_ / "source/a.fp16.safetensors", "x");
  write_file(tmp_ / "source/tf_model.h5.index.json",
             R"({"weight_map": {"v": "tf-1.h5", "w": "tf-2.h5"}})");
  write_file(tmp_ / "source/tf-1.h5", "x");
  write_file(tmp_ / "source/tf-2.h5", "x");
  write_file(tmp_ / "source/no.index.json", "[]");
  write_file(tmp_ / "source/bad.index.json", "{");
  const std::vector<std::string> copied = {"bad.index.json", "no.index.json", "tf-1.h5", "tf-2.h5",
                                           "tf_model.h5.index.json"};
  EXPECT_EQ(carried(plan()), copied);
  EXPECT_EQ(left(plan()), (FileNames{"a.fp16.safetensors: looks like a checkpoint file",
                                     variant + ": lists shards that are not copied"}));
}

TEST_F(ExtraFilesTest, WeightsOfTheBaseInTheFilesOfAnAdapterAreNoted) {
  const auto notes_of = [&](const std::vector<std::string>& names) {
    MemoryCheckpoint memory;
    for (const std::string& name : names) {
      memory.add({"base_model.model." + name, DType::float32, {2}}, test::bytes_of<float>({1, 2}));
    }
    write_native(memory, tmp_ / "peft", {}, 1, OverwritePolicy::replace);
    const ExtraFilesPlan found = plan({}, Format::safetensors, {"peft"});
    EXPECT_EQ(found.stem, "adapter_model");
    std::vector<std::string> notes;
    for (const auto& note : found.notes) notes.push_back(note.found);
    return notes;
  };
  const std::string without_config = "none (copy it, too)";
  EXPECT_EQ(notes_of({"w.lora_A.weight", "w.lora_B.weight"}), FileNames{without_config});
  EXPECT_EQ(notes_of({"e.base_layer.weight", "e.lora_embedding_A", "e.lora_embedding_B"}),
            FileNames{without_config});
  EXPECT_EQ(notes_of({"w.base_layer.weight", "w.lora_A.default.weight"}),
            (FileNames{"weights of the base model too, such as base_model.model.w.base_layer.weight"
                       ": PEFT does not load a whole model as an adapter",
                       without_config}));
}

TEST_F(ExtraFilesTest, ACastPutsItsDTypeIntoTheConfig) {
  const std::string config = R"({"torch_dtype": "float32"})";
  write_file(tmp_ / "source/config.json", config);
  EXPECT_EQ(plan().carried.at(0).text, std::nullopt);
  cast_ = DType::float32;
  EXPECT_EQ(plan().carried.at(0).text, std::nullopt);
  cast_ = DType::float16;
  const auto found = plan();
  EXPECT_EQ(found.carried.at(0).text, R"({"torch_dtype": "float16"})");
  EXPECT_EQ(found.carried.at(0).nbytes, config.size());
  ASSERT_EQ(found.edits.size(), 1U);
  EXPECT_EQ(found.edits[0].what, "torch_dtype: float32 to float16");
  EXPECT_TRUE(found.notes.empty());
}

TEST_F(ExtraFilesTest, AConfigWithAnotherDTypeThanTheWeightsIsNoted) {
  const auto notes_of = [&](const std::string& config, Format format) {
    write_file(tmp_ / "source/config.json", config);
    FileNames lines;
    for (const formats::Finding& note : plan({}, format).notes) lines.push_back(note.found);
    return lines;
  };
  const std::string bfloat16 = R"({"torch_dtype": "bfloat16"})";
  const FileNames noted{"bfloat16, to which loaders round them (copied unchanged)"};
  EXPECT_EQ(notes_of(bfloat16, Format::safetensors), noted);
  EXPECT_EQ(notes_of(R"({"text_config": {"dtype": "bfloat16"}})", Format::safetensors), noted);
  EXPECT_EQ(notes_of(bfloat16, Format::dcp), FileNames{});  // no loader of models reads it
  for (const std::string equal :
       {R"({"torch_dtype": "float32", "text_config": {"torch_dtype": "bfloat16"}})",
        R"({"torch_dtype": "auto"})", R"({"torch_dtype": null})", "{}", "no JSON",
        R"({"torch_dtype": "bfloat16", "quantization_config": {}})"}) {
    EXPECT_EQ(notes_of(equal, Format::safetensors), FileNames{}) << equal;
  }
}

TEST_F(ExtraFilesTest, ALostNameByWhichLoadersFindTheFileIsNoted) {
  write("unet", Format::safetensors);
  const auto notes_of = [&](const std::string& name, const std::string& to) {
    const std::string path = tmp_ / ("unet/" + name);
    fs_.rename(tmp_ / "unet/model.safetensors", path);
    const std::size_t count = plan({}, Format::safetensors, {"unet"}, to).notes.size();
    fs_.rename(path, tmp_ / "unet/model.safetensors");
    return count;
  };
  EXPECT_EQ(notes_of("diffusion_pytorch_model.fp16.safetensors", "moved"), 1U);
  EXPECT_EQ(notes_of("pytorch_lora_weights.safetensors", "moved"), 0U);
  EXPECT_EQ(notes_of("pytorch_lora_weights.safetensors", "moved.safetensors"), 0U);
  EXPECT_TRUE(plan({}, Format::safetensors, {"unet"}).notes.empty());
}

TEST_F(ExtraFilesTest, FilesKeepTheStemByWhichLoadersFindThem) {
  write("unet", Format::safetensors);
  const std::string usual = tmp_ / "unet/model.safetensors";
  const auto stem_of = [&](const std::string& name, const ExtraFilesOptions& options = {}) {
    const std::string path = tmp_ / ("unet/" + name + ".safetensors");
    fs_.rename(usual, path);
    const std::string stem = plan(options, Format::safetensors, {"unet"}).stem;
    EXPECT_EQ(plan(options, Format::safetensors, {"unet/" + name + ".safetensors"}).stem,
              name.starts_with("adapter") ? "adapter_model" : "model");
    EXPECT_EQ(plan(options, Format::safetensors, {"unet"}, "moved.safetensors").stem,
              name.starts_with("adapter") ? "adapter_model" : "model");
    fs_.rename(path, usual);
    return stem;
  };
  EXPECT_EQ(stem_of("diffusion_pytorch_model"), "diffusion_pytorch_model");
  EXPECT_EQ(stem_of("adapter_model"), "adapter_model");
  EXPECT_EQ(stem_of("diffusion_pytorch_model.fp16"), "model");
  EXPECT_EQ(stem_of("model-00001-of-00001"), "model");  // without an index
  EXPECT_EQ(stem_of("shard-00001-model-00001-of-00001"), "model");
  EXPECT_EQ(stem_of("diffusion_pytorch_model", {.is_converted = true}), "model");
}

TEST_F(ExtraFilesTest, TheIndexOfAFolderKeepsTheStemToo) {
  write("unet", Format::safetensors);
  const std::string shard = "diffusion_pytorch_model-00001-of-00001.safetensors";
  fs_.rename(tmp_ / "unet/model.safetensors", tmp_ / ("unet/" + shard));
  write_file(tmp_ / "unet/diffusion_pytorch_model.safetensors.index.json",
             R"({"metadata": {}, "weight_map": {"w": ")" + shard + "\"}}");
  for (const std::string source : {"unet", "unet/diffusion_pytorch_model.safetensors.index.json"}) {
    const ExtraFilesPlan found = plan({}, Format::safetensors, {source});
    EXPECT_EQ(found.stem, "diffusion_pytorch_model") << source;
    EXPECT_TRUE(found.notes.empty());
  }
}

TEST_F(ExtraFilesTest, TheConfigOfDiffusersNamesTheFiles) {
  const auto write_config = [&](const std::string& folder, const std::string& config) {
    write_file(tmp_ / (folder + "/config.json"), config);
  };
  const std::string diffusers = R"({"_class_name": "UNet", "_diffusers_version": "0.35.0"})";
  write_config("source", diffusers);
  EXPECT_EQ(plan({}, Format::safetensors).stem, "diffusion_pytorch_model");
  EXPECT_TRUE(plan({}, Format::safetensors).notes.empty());
  EXPECT_EQ(plan({.policy = ExtraFilesPolicy::leave}, Format::safetensors).stem, "model");
  for (const std::string other :
       {R"({"_class_name": "UNet"})", R"({"architectures": ["Llama"]})", "[]", "no JSON"}) {
    write_config("source", other);
    EXPECT_EQ(plan({}, Format::safetensors).stem, "model") << other;
  }
  // The name of the source is kept, with a note if diffusers does not look for it.
  write("unet", Format::safetensors);
  write_config("unet", diffusers);
  const ExtraFilesPlan kept = plan({}, Format::safetensors, {"unet"});
  EXPECT_EQ(kept.stem, "model");
  ASSERT_EQ(kept.notes.size(), 1U);
  EXPECT_EQ(kept.notes[0].expected,
            "diffusion_pytorch_model.safetensors, which diffusers looks for");
}

TEST_F(ExtraFilesTest, AConfigThatACastCannotEditIsCarriedWithANote) {
  cast_ = DType::float16;
  for (const char* config : {"\xEF\xBB\xBF{\"torch_dtype\": \"float32\"}", "{\"torch_dtype\""}) {
    write_file(tmp_ / "source/config.json", config);
    const auto found = plan();
    EXPECT_EQ(found.carried.at(0).text, std::nullopt);
    EXPECT_TRUE(found.edits.empty());
    ASSERT_EQ(found.notes.size(), 1U);
    EXPECT_TRUE(found.notes[0].where.path.ends_with("source/config.json"));
  }
  cast_ = DType::float32;  // the tensors have it already
  EXPECT_TRUE(plan().notes.empty());
}

}  // namespace
}  // namespace tessera::reshard
