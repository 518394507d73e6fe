#include "tessera/formats/detect.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "support/error_matchers.h"
#include "support/fixtures.h"
#include "support/temporary_directory.h"
#include "support/zip_bytes.h"
#include "tessera/base/error.h"
#include "tessera/formats/format_driver.h"

namespace tessera::formats {
namespace {

using test::TemporaryDirectory;
using test::ThrowsError;
using test::zip_bytes;
using testing::AllOf;
using testing::HasSubstr;

const std::string kAllFixtures = test::fixture("");

Format detect(const std::string& path) {
  return detect_format(FileSystem::posix(), path);
}

std::string refusal(const std::string& path) {
  try {
    detect(path);
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

void write(const std::string& path, const std::string& content) {
  std::ofstream(path, std::ios::binary) << content;
}

TEST(DetectTest, FindsEveryFormatByWhatItIs) {
  EXPECT_EQ(detect(kAllFixtures + "dcp/valid/world1"), Format::dcp);
  EXPECT_EQ(detect(kAllFixtures + "dcp/valid/hf_consolidated"), Format::safetensors);
  EXPECT_EQ(detect(kAllFixtures + "safetensors/valid/sharded"), Format::safetensors);
  EXPECT_EQ(detect(kAllFixtures + "safetensors/valid/single.safetensors"), Format::safetensors);
  EXPECT_EQ(detect(kAllFixtures + "torch_zip/valid/views.pt"), Format::torch_zip);
}

TEST(DetectTest, FilesAreKnownByContentWhereTheNameDoesNotSay) {
  const TemporaryDirectory directory;
  std::filesystem::copy(kAllFixtures + "safetensors/valid/single.safetensors", directory / "model");
  EXPECT_EQ(detect(directory / "model"), Format::safetensors);
  std::filesystem::copy(kAllFixtures + "torch_zip/valid/views.pt", directory / "model.bin");
  EXPECT_EQ(detect(directory / "model.bin"), Format::torch_zip);
}

TEST(DetectTest, SaysWhatIsWrong) {
  const TemporaryDirectory directory;
  EXPECT_THAT(refusal(directory / "absent"),
              HasSubstr("absent: expected a checkpoint, found nothing"));
  EXPECT_THAT(refusal(directory.path()), HasSubstr("found an empty directory"));
  write(directory / "nothing", "");
  EXPECT_THAT(refusal(directory / "nothing"), HasSubstr("found an empty file"));
  EXPECT_THAT(refusal(directory.path()), HasSubstr("found a directory with none of them"));
  write(directory / "table.h5", "\x89HDF\r\n\x1a\n and more");
  EXPECT_THAT(refusal(directory / "table.h5"), HasSubstr("an HDF5 file"));
  EXPECT_THAT(refusal("/dev/null"), HasSubstr("found a device"));
}

TEST(DetectTest, NamesTheFormOfFilesOfEachRank) {
  const std::pair<const char*, const char*> forms[] = {
      {"zero_pp_rank_0_mp_rank_00_model_states.pt", "DeepSpeed ZeRO"},
      {"model_optim_rng.pt", "Megatron-LM"}};
  for (const auto& [name, words] : forms) {
    const TemporaryDirectory directory;
    write(directory / name, "x");
    EXPECT_THAT(refusal(directory.path()), HasSubstr(words));
  }
}

TEST(DetectTest, SaysWhatFilesOfMetaAre) {
  const TemporaryDirectory directory;
  write(directory / "params.json", "{}");
  write(directory / "consolidated.00.pth", "x");
  EXPECT_THAT(refusal(directory.path()),
              HasSubstr("found a folder with consolidated.00.pth, a whole model of Meta in one "
                        "file (give the path " +
                        (directory / "consolidated.00.pth") + ")"));
  write(directory / "consolidated.01.pth", "x");
  EXPECT_THAT(refusal(directory.path()),
              HasSubstr("found consolidated.00.pth to consolidated.01.pth, the parts of 2 ranks "
                        "in tensor parallelism, as Meta saves models; Tessera does not join them"));
  write(directory / "consolidated.03.pth", "x");
  EXPECT_THAT(refusal(directory.path()),
              HasSubstr("found consolidated.00.pth to consolidated.03.pth without "
                        "consolidated.02.pth, the parts of 4 ranks"));
}

TEST(DetectTest, PointsAtTheCheckpointWithin) {
  const TemporaryDirectory directory;
  std::filesystem::create_directory(directory / "step-100");
  write(directory / "step-100/.metadata", "x");
  EXPECT_THAT(refusal(directory.path()),
              HasSubstr("did you mean " + (directory / "step-100") + "?"));
  std::filesystem::create_directory(directory / "optimizer_0");
  write(directory / "optimizer_0/.metadata", "x");
  EXPECT_THAT(refusal(directory.path()),
              HasSubstr("found a directory that has checkpoints in it: optimizer_0, step-100 (give "
                        "the path of one, or merge them)"));
  write(directory / "pytorch_model_fsdp_rank0.bin", "x");
  EXPECT_THAT(refusal(directory.path()),
              HasSubstr("optimizer_0, step-100, and files of ranks, such as "
                        "pytorch_model_fsdp_rank0.bin (give"));
}

TEST(DetectTest, IncompleteCheckpointsAreToldFromOthers) {
  const TemporaryDirectory directory;
  write(directory / "rank-00000.h5", "x");
  EXPECT_THAT(refusal(directory.path()), HasSubstr("rebuild_native_index"));
  std::filesystem::remove(directory / "rank-00000.h5");
  write(directory / "__0_0.distcp", "x");
  EXPECT_THAT(refusal(directory.path()),
              HasSubstr(".metadata: expected this file next to the .distcp files"));
  EXPECT_THAT(refusal(directory / "__0_0.distcp"), HasSubstr("give the path of its directory"));
  write(directory / "__0.metadata", "x");
  EXPECT_THAT(refusal(directory.path()), HasSubstr("use_collectives=False"));
  EXPECT_EQ(refusal(directory / "__0.metadata"), "accepted");
}

TEST(DetectTest, AnIncompleteCheckpointBesideAnotherIsNamedWithIt) {
  const TemporaryDirectory directory;
  write(directory / "model.safetensors", "x");
  write(directory / "rank-00000.h5", "x");
  const auto both = [](const std::string& incomplete) {
    return HasSubstr("directory: expected the files of one checkpoint, found " + incomplete +
                     " and model.safetensors (safetensors) (move the files of other formats");
  };
  EXPECT_THAT(refusal(directory.path()), both("rank-00000.h5 (native, without index.h5)"));
  write(directory / "__0_0.distcp", "x");
  EXPECT_THAT(refusal(directory.path()),
              both("rank-00000.h5 (native, without index.h5), __0_0.distcp (dcp, without "
                   ".metadata)"));
  std::filesystem::remove(directory / "rank-00000.h5");
  EXPECT_THAT(refusal(directory.path()), both("__0_0.distcp (dcp, without .metadata)"));
  std::filesystem::remove(directory / "__0_0.distcp");
  EXPECT_EQ(refusal(directory.path()), "accepted");
}

TEST(DetectTest, NamesTheNewestCheckpointOfAMegatronRun) {
  const TemporaryDirectory megatron;
  const auto open = [&] { open_checkpoint(FileSystem::posix(), megatron.path()); };
  write(megatron / "latest_checkpointed_iteration.txt", "100\n");
  EXPECT_THAT(open, ThrowsError(ErrorKind::unsupported, "without a checkpoint: no folder iter_*"));
  for (const char* name : {"iter_0000020", "iter_0000100", "logs"}) {
    std::filesystem::create_directory(megatron / name);
  }
  EXPECT_THAT(open, ThrowsError(ErrorKind::unsupported,
                                "found a folder of Megatron's checkpoints (give the path of one "
                                "checkpoint, such as " +
                                    (megatron / "iter_0000100")));
  std::filesystem::create_directory(megatron / "mp_rank_00");
  EXPECT_EQ(detect(megatron.path()), Format("megatron"));
}

TEST(DetectTest, KnowsAFolderOfDeepSpeedByItsStepsOrItsScript) {
  const TemporaryDirectory deepspeed;
  write(deepspeed / "latest", "global_step100");
  EXPECT_THAT(refusal(deepspeed.path()), HasSubstr("found a directory with none of them"));
  std::filesystem::create_directory(deepspeed / "global_step100");
  EXPECT_EQ(detect(deepspeed.path()), Format("deepspeed"));
  std::filesystem::remove(deepspeed / "global_step100");
  write(deepspeed / "zero_to_fp32.py", "");
  EXPECT_EQ(detect(deepspeed.path()), Format("deepspeed"));
  std::filesystem::remove(deepspeed / "latest");
  EXPECT_THAT(refusal(deepspeed.path()), HasSubstr("found a directory with none of them"));
  write(deepspeed / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "");
  EXPECT_EQ(detect(deepspeed.path()), Format("deepspeed"));
}

TEST(DetectTest, EveryFixtureMayBeReplaced) {
  int num_passed = 0;
  for (const char* folder : {"dcp/valid", "dcp/v2.2", "dcp/v2.5", "dcp/v2.11", "dcp/v2.15",
                             "native/v1", "safetensors/valid", "torch_zip/valid"}) {
    for (const auto& entry : std::filesystem::directory_iterator(kAllFixtures + folder)) {
      const bool has_folder_within = entry.path().filename() == "hf_consolidated";
      const bool has_extra_files = std::filesystem::exists(entry.path() / "config.json");
      const bool is_tar = entry.path().filename() == "tar.pt";  // a tar may hold anything
      if (entry.path().extension() == ".json" || has_folder_within || has_extra_files || is_tar) {
        continue;
      }
      EXPECT_NO_THROW(check_replaceable(FileSystem::posix(), entry.path(), "replace"));
      ++num_passed;
    }
  }
  EXPECT_GT(num_passed, 40);
}

void allow_replacing(const std::string& path) {
  check_replaceable(FileSystem::posix(), path, "replace");
}

TEST(DetectTest, ATarIsNotReplaced) {
  EXPECT_THAT([] { allow_replacing(kAllFixtures + "torch_zip/valid/tar.pt"); },
              ThrowsMessage<Error>(HasSubstr("expected a torch.save archive, found a file of")));
}

TEST(DetectTest, SeveralCheckpointsInOneFolderAreNotReplaced) {
  const auto check = [](const char* format, const std::vector<std::string>& names) {
    driver_of(Format(format))
        .require_one_checkpoint(FileSystem::posix(), "run", names, "--overwrite");
  };
  EXPECT_NO_THROW(check("deepspeed", {"global_step1_universal", "latest_universal"}));
  EXPECT_THAT(
      [&] {
        check("deepspeed", {"global_step1_universal", "global_step2_universal"});
      },
      ThrowsError(ErrorKind::invalid_argument, "found 'global_step1_universal'"));
  const std::string of_two = "model_world_size_2_rank_0.pt";
  EXPECT_NO_THROW(check("rank_files", {of_two, "model_world_size_2_rank_1.pt"}));
  EXPECT_THAT(
      [&] {
        check("rank_files", {of_two, "model_world_size_4_rank_0.pt"});
      },
      ThrowsError(ErrorKind::invalid_argument, "found 'model_world_size_4_rank_0.pt'"));
}

/// Returns the beginning of an archive: the header and the first byte of its only entry.
std::string cut_archive(const std::string& name) {
  const std::string whole = zip_bytes({{.name = name, .data = "content"}});
  return whole.substr(0, whole.find("content") + 1);
}

void copy_writable(const std::string& from, const std::string& to) {
  std::filesystem::copy(from, to);
  std::filesystem::permissions(to, std::filesystem::perms::owner_write,
                               std::filesystem::perm_options::add);
}

TEST(DetectTest, OrdinaryFilesAreNoneToReplace) {
  const TemporaryDirectory directory;
  const std::string long_header("\xff\0\0\0\0\0\0\0{", 9);
  for (const auto& [name, content] : std::map<std::string, std::string>{
           {"prog.c", "int f() {\n return 1;\n}\n"},
           {"thesis.tex", "\\section{On this}"},
           {"config.json", "{\"abc\": {\"x\": 1}}"},
           {"data", long_header},
           {"notes.safetensors", "ab\n"},
           {"book.zip", zip_bytes({{.name = "book/data/1.txt"}, {.name = "book/data.pkl.txt"}})},
           {"cut.zip", cut_archive("book/data/chapter.txt")},
           {"deflated.zip", zip_bytes({{.name = "book/data.pkl", .method = 8}})},
           {"deep.zip", zip_bytes({{.name = "a/book/data.pkl"}})}}) {
    SCOPED_TRACE(name);
    write(directory / name, content);
    EXPECT_THAT([&] { allow_replacing(directory / name); },
                ThrowsError(ErrorKind::invalid_argument, name + ": replace: expected"));
  }
}

TEST(DetectTest, DamagedFilesAreReplacedForWhatIsLeft) {
  const TemporaryDirectory directory;
  for (const auto& [name, content] : std::map<std::string, std::string>{
           {"model.safetensors", std::string("\xff\0\0\0\0\0\0\0{", 9)},
           {"nothing", ""},
           {"saved.pt", cut_archive("saved/data.pkl")},
           {"script.pt", cut_archive("script/data/12")}}) {
    SCOPED_TRACE(name);
    write(directory / name, content);
    EXPECT_NO_THROW(allow_replacing(directory / name));
  }
}

TEST(DetectTest, ArchivesAreKnownByWhatTheyHoldAnywhere) {
  const TemporaryDirectory directory;
  write(directory / "script.pt", zip_bytes({{.name = "script/extra/labels.txt"},
                                            {.name = "script/data.pkl", .data = "\x80"}}));
  EXPECT_NO_THROW(allow_replacing(directory / "script.pt"));
}

TEST(DetectTest, FilesOfOtherCheckpointsAreForeign) {
  const TemporaryDirectory directory;
  const std::string single = kAllFixtures + "safetensors/valid/single.safetensors";
  for (const auto& [fixture, name] : std::map<std::string, std::string>{
           {"dcp/valid/tied", "adapter_model.safetensors"},
           {"dcp/invalid/no_metadata", "adapter_model.safetensors"},
           {"native/v1/zstd", "adapter_model.safetensors"},
           {"native/invalid/no_index", "results.h5"},
           {"safetensors/valid/sharded", "lora.safetensors"},
           {"safetensors/invalid/index_no_weight_map", "lora.safetensors"}}) {
    SCOPED_TRACE(fixture);
    const std::string folder = directory / last_component(fixture);
    std::filesystem::create_directory(folder);
    for (const auto& entry : std::filesystem::directory_iterator(kAllFixtures + fixture)) {
      copy_writable(entry.path(), folder + "/" + entry.path().filename().string());
    }
    EXPECT_NO_THROW(allow_replacing(folder));
    copy_writable(single, folder + "/" + name);
    EXPECT_THAT([&] { allow_replacing(folder); },
                ThrowsError(ErrorKind::invalid_argument, "found '" + name + "'"));
  }
}

TEST(DetectTest, OneFileOfAShardedCheckpointIsNoneToReplace) {
  const TemporaryDirectory directory;
  const auto check = [&](const std::string& name) {
    EXPECT_THAT([&] { allow_replacing(directory / name); },
                ThrowsError(ErrorKind::invalid_argument, "found one file of a sharded checkpoint"));
  };
  const std::string fixture = kAllFixtures + "safetensors/valid/sharded";
  for (const auto& entry : std::filesystem::directory_iterator(fixture)) {
    copy_writable(entry.path(), directory / entry.path().filename().string());
  }
  check("model.safetensors.index.json");
  const std::string shard = "model-00002-of-00003.safetensors";
  check(shard);
  std::filesystem::remove(directory / "model.safetensors.index.json");
  check(shard);
  for (const auto& entry : std::filesystem::directory_iterator(directory.path())) {
    if (entry.path().filename() != shard) std::filesystem::remove(entry.path());
  }
  EXPECT_NO_THROW(allow_replacing(directory / shard));
  write(directory / "model.safetensors.index.json", R"({"weight_map": {"a": "any.safetensors"}})");
  std::filesystem::rename(directory / shard, directory / "any.safetensors");
  check("any.safetensors");
}

TEST(DetectTest, DistcpFilesAreLookedInto) {
  const TemporaryDirectory directory;
  for (const std::size_t num_before : {0U, 100U, 518U, 4000U}) {
    const std::string before(num_before, '\0');
    write(directory / "__0_0.distcp", before + cut_archive("archive/data.pkl"));
    EXPECT_NO_THROW(allow_replacing(directory.path())) << num_before;
  }
  write(directory / "notes.distcp", std::string(100, '\0') + "my measurements");
  EXPECT_THAT([&] { allow_replacing(directory.path()); },
              ThrowsError(ErrorKind::invalid_argument,
                          "notes.distcp: replace: expected items of a distributed checkpoint"));
}

TEST(DetectTest, FlatLayoutIsApplied) {
  const std::string flat = kAllFixtures + "dcp/valid/fsdp1_flat";
  const auto reader =
      open_checkpoint(FileSystem::posix(), flat, {.flat_layout_path = flat + ".flat-layout.json"});
  EXPECT_NE(reader->contents().find_tensor("model.layers.0.up.weight"), nullptr);
  EXPECT_EQ(reader->contents().find_tensor("model.layers.0._flat_param"), nullptr);
}

}  // namespace
}  // namespace tessera::formats
