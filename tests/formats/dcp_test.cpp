#include "formats/dcp.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "formats/dcp/metadata.h"
#include "formats/flat_layout.h"
#include "formats/key_order.h"
#include "formats/pickle/pickler.h"
#include "support/copy_checkpoint.h"
#include "support/error_matchers.h"
#include "support/expectation.h"
#include "support/fault_file_system.h"
#include "support/fixtures.h"
#include "support/memory_checkpoint.h"
#include "support/memory_files.h"
#include "support/reading.h"
#include "support/temporary_directory.h"
#include "support/zip_bytes.h"
#include "tessera/base/error.h"
#include "tessera/layout/region.h"

// Shows E2, E3, E9. DCP and flat layouts, tied weights; nothing from a file is executed.
namespace tessera::formats {
namespace {

using test::expect_holds;
using test::findings_of;
using test::fixture;
using test::InvalidFixture;
using test::MemoryCheckpoint;
using test::MemoryFiles;
using test::read_everything;
using test::TemporaryDirectory;
using test::ThrowsError;
using testing::HasSubstr;

std::unique_ptr<CheckpointReader> open_folder(const std::string& path) {
  return open_dcp(FileSystem::posix(), path);
}

/// Returns the DCP checkpoints in a directory of fixtures.
std::vector<std::string> checkpoints_in(const std::string& directory) {
  std::vector<std::string> paths;
  for (const std::string& name : FileSystem::posix().list_directory(directory)) {
    const std::string path = join_path(directory, name);
    if (FileSystem::posix().kind_of(join_path(path, ".metadata"))) paths.push_back(path);
  }
  return paths;
}

std::vector<std::string> valid_checkpoints() {
  std::vector<std::string> paths;
  for (const char* group : {"dcp/valid", "dcp/v2.2", "dcp/v2.5", "dcp/v2.11", "dcp/v2.15"}) {
    const std::vector<std::string> more = checkpoints_in(fixture(group));
    EXPECT_FALSE(more.empty()) << group;
    paths.insert(paths.end(), more.begin(), more.end());
  }
  return paths;
}

void expect_covered(const CheckpointReader& reader) {
  for (const TensorEntry& tensor : reader.contents().tensors) {
    std::vector<Region> regions;
    for (const Piece& piece : tensor.pieces) regions.push_back(piece.region);
    EXPECT_TRUE(check_coverage(regions, tensor.meta.shape).empty()) << tensor.meta.fqn;
  }
}

MemoryFiles memory_files_of(const std::string& checkpoint) {
  std::map<std::string, std::string> files;
  for (const std::string& name : FileSystem::posix().list_directory(checkpoint)) {
    files[name] = read_file(FileSystem::posix(), join_path(checkpoint, name), 1 << 24);
  }
  return MemoryFiles("ck", std::move(files));
}

TEST(DcpTest, ReadsWhatPyTorchSaved) {
  for (const std::string& path : valid_checkpoints()) {
    SCOPED_TRACE(path);
    const auto reader = open_folder(path);
    expect_holds(*reader, path + ".expect.json");
    expect_covered(*reader);
    EXPECT_TRUE(findings_of(*reader).empty());
  }
}

TEST(DcpTest, ReadsWhatIsBesideObjectsOfClasses) {
  const std::vector<std::string> paths = checkpoints_in(fixture("dcp/classes"));
  EXPECT_EQ(paths.size(), 4u);
  for (const std::string& path : paths) {
    SCOPED_TRACE(path);
    const auto reader = open_folder(path);
    expect_holds(*reader, path + ".expect.json");
    expect_covered(*reader);
    const std::vector<Finding> findings = findings_of(*reader);
    EXPECT_FALSE(findings.empty());
    for (const Finding& finding : findings) EXPECT_EQ(finding.severity, Finding::Severity::note);
  }
}

TEST(DcpTest, AttributesThatTheMetadataHasBesideAreNoted) {
  const auto reader = open_folder(fixture("dcp/classes/newer_metadata"));
  ASSERT_EQ(reader->contents().opening_findings.size(), 1u);
  EXPECT_EQ(reader->contents().opening_findings[0].rule, "attributes");
  EXPECT_EQ(reader->contents().opening_findings[0].found,
            "also origin: left out (written by a newer PyTorch?)");
}

TEST(DcpTest, VerifyNotesClassesThatTheMetadataNames) {
  const auto reader = open_folder(fixture("dcp/classes/newer_metadata"));
  const std::vector<Finding> findings = findings_of(*reader);
  ASSERT_EQ(findings.size(), 2u);
  EXPECT_EQ(findings[0].rule, "attributes");
  EXPECT_EQ(findings[1].rule, "foreign");
  EXPECT_THAT(findings[1].found, HasSubstr("pathlib.PureWindowsPath, "
                                           "torch.distributed.checkpoint.metadata.Origin"));
}

TEST(DcpTest, TensorsInValuesHaveNamesByPath) {
  const std::string path = fixture("dcp/valid/not_flattened_nested");
  const auto reader = open_folder(path);
  const CheckpointContents& contents = reader->contents();
  ASSERT_NE(contents.find_tensor("ema.list.0"), nullptr);
  EXPECT_EQ(contents.find_tensor("ema.list.0")->key_path,
            (KeyPath{"ema", "list", std::int64_t{0}}));
  EXPECT_THAT(contents.simplifications,
              testing::ElementsAre(Simplification{Simplification::Kind::tuple, "pair"}));
  MemoryFiles files = memory_files_of(path);
  files.remove("__0_0.distcp");
  const auto without_data = open_dcp(files, "ck");
  EXPECT_EQ(without_data->contents().values.size(),
            4u);  // the metadata does not say what they hold
  EXPECT_EQ(without_data->find_missing_data().values.size(), 4u);
}

TEST(DcpTest, OneRankOfASaveWithoutCoordinationIsRead) {
  for (const char* rank : {"0", "1"}) {
    const std::string path = fixture("dcp/no_collectives/__") + rank + ".metadata";
    const auto reader = open_folder(path);
    expect_holds(*reader, path + ".expect.json");
    EXPECT_TRUE(findings_of(*reader).empty());
    ASSERT_TRUE(reader->contents().part);
    EXPECT_EQ(
        part_in_words(*reader->contents().part),
        "one rank of 2: rank " + std::string(rank) + ", as the names of the files beside it say");
    EXPECT_EQ(reader->contents().world_size, 1);
    EXPECT_EQ(reader->path(), path);
    EXPECT_EQ(reader->data_files().size(), 1u);
  }
}

TEST(DcpTest, EachPartOfAValueIsVerifiedOnce) {
  MemoryFiles files = memory_files_of(fixture("dcp/valid/not_flattened_nested"));
  std::string& data = files["__0_0.distcp"];
  const std::string weight("\0\0\0\0\0\0\x80\x3f\0\0\0\x40", 12);
  const std::size_t at = data.find(weight);  // of `model`; `ema` has a copy
  ASSERT_NE(at, std::string::npos);
  data[at + 7] ^= 1;
  const auto reader = open_dcp(files, "ck");
  const std::vector<Finding> findings = findings_of(*reader);
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_EQ(findings[0].rule, "checksum");
}

TEST(DcpTest, FlatVectorsAreReadAsParameters) {
  for (const char* name : {"fsdp1_flat", "fsdp1_flat_aligned"}) {
    SCOPED_TRACE(name);
    const std::string path = fixture("dcp/valid/") + name;
    const auto reader = apply_flat_layout(
        open_folder(path), read_flat_layout(FileSystem::posix(), path + ".flat-layout.json"));
    expect_holds(*reader, path + ".unflattened.expect.json");
    expect_covered(*reader);
  }
}

TEST(DcpTest, RanksAreThoseOfTheFileNames) {
  const auto reader = open_folder(fixture("dcp/valid/fsdp1_adamw"));
  EXPECT_EQ(reader->contents().world_size, 4);
  const TensorEntry* weight = reader->contents().find_tensor("model.emb.weight");
  ASSERT_EQ(weight->pieces.size(), 4u);
  for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(weight->pieces[std::size_t(rank)].rank, rank);
  const PieceStorage storage = reader->piece_storage(
      static_cast<std::size_t>(weight - reader->contents().tensors.data()), 2);
  EXPECT_EQ(storage.file, "__2_0.distcp");
  EXPECT_EQ(storage.encoding, "plain");
  ASSERT_TRUE(storage.byte_range.has_value());
  EXPECT_EQ(storage.byte_range->nbytes(),
            static_cast<std::uint64_t>(numel_of(weight->pieces[2].region)) * 4);
}

TEST(DcpTest, SeveralFilesOfOneProcessAreOneRank) {
  EXPECT_EQ(open_folder(fixture("dcp/valid/many_files"))->contents().world_size, 1);
}

TEST(DcpTest, KeyPathsAreThoseOfTheStateDict) {
  const auto reader = open_folder(fixture("dcp/valid/nested"));
  EXPECT_EQ(reader->contents().find_tensor("list.1.k")->key_path,
            (KeyPath{"list", std::int64_t{1}, "k"}));
  EXPECT_EQ(reader->contents().find_tensor("dict.0")->key_path, (KeyPath{"dict", "0"}));
  EXPECT_TRUE(open_folder(fixture("dcp/valid/not_flattened"))
                  ->contents()
                  .find_tensor("a.b")
                  ->key_path.empty());
}

TEST(DcpTest, OpeningReadsTheMetadataAlone) {
  const MemoryFiles files = memory_files_of(fixture("dcp/valid/fsdp1_adamw"));
  const auto reader = open_dcp(files, "ck");
  EXPECT_EQ(files.take_reads().nbytes, files.files().at(".metadata").size());
}

TEST(DcpTest, RefusesEveryInvalidCheckpoint) {
  for (const InvalidFixture& bad : test::invalid_fixtures("dcp")) {
    SCOPED_TRACE(bad.path + ": " + bad.rule);
    try {
      const auto reader = open_folder(bad.path);
      const bool is_found = !findings_of(*reader).empty();
      bool is_covered = true;
      for (const TensorEntry& tensor : reader->contents().tensors) {
        std::vector<Region> regions;
        for (const Piece& piece : tensor.pieces) regions.push_back(piece.region);
        is_covered = is_covered && check_coverage(regions, tensor.meta.shape).empty();
      }
      EXPECT_TRUE(is_found || !is_covered) << "verify found nothing";
      if (!is_covered) continue;  // a move reports this
      read_everything(*reader);
      ADD_FAILURE() << "was accepted";
    } catch (const Error& error) {
      EXPECT_THAT(error.kind(), testing::AnyOf(ErrorKind::corruption, ErrorKind::unsupported,
                                               ErrorKind::not_found));
      EXPECT_THAT(error.what(), HasSubstr(bad.path));
      for (const std::string& word : bad.contains) EXPECT_THAT(error.what(), HasSubstr(word));
    }
  }
}

TEST(DcpTest, AValueThatIsNeverReadIsANoteAndItsBytesAreChecked) {
  MemoryFiles files = memory_files_of(fixture("dcp/invalid/os_system_in_value"));
  const std::vector<Finding> findings = findings_of(*open_dcp(files, "ck"));
  ASSERT_EQ(findings.size(), 2u);
  EXPECT_EQ(findings[0].severity, Finding::Severity::note);
  EXPECT_EQ(findings[0].rule, "value");
  EXPECT_EQ(findings[1].severity, Finding::Severity::note);
  EXPECT_EQ(findings[1].rule, "foreign");
  EXPECT_THAT(findings[1].found, HasSubstr("os.system"));
  EXPECT_EQ(findings[0].where.fqn, "step");
  EXPECT_THAT(findings[0].found, HasSubstr("call of os.system; nothing was executed"));

  std::string& bytes = files["__2_0.distcp"];
  bytes[bytes.find("3\n", bytes.find("archive/version"))] = '4';  // not in the pickle
  const std::vector<Finding> damaged = findings_of(*open_dcp(files, "ck"));
  ASSERT_FALSE(damaged.empty());
  EXPECT_EQ(damaged[0].severity, Finding::Severity::error);
  EXPECT_EQ(damaged[0].rule, "checksum");
}

TEST(DcpTest, FindsWhatLiesInLostFiles) {
  const std::string path = fixture("dcp/valid/fsdp2_adamw");
  EXPECT_TRUE(open_folder(path)->find_missing_data().pieces.empty());
  std::size_t num_values = 0;
  for (int rank = 0; rank < 4; ++rank) {
    SCOPED_TRACE(rank);
    const std::string file = "__" + std::to_string(rank) + "_0.distcp";
    MemoryFiles files = memory_files_of(path);
    files.remove(file);
    const auto reader = open_dcp(files, "ck");
    const MissingData missing = reader->find_missing_data();
    for (const auto& [v, name] : missing.values) {
      EXPECT_EQ(name, file);
      EXPECT_THROW(reader->read_value(v), Error);
    }
    num_values += missing.values.size();
    const CheckpointContents& contents = reader->contents();
    std::map<std::size_t, MissingData::Pieces> expected;
    for (std::size_t t = 0; t < contents.tensors.size(); ++t) {
      const std::vector<Piece>& pieces = contents.tensors[t].pieces;
      for (std::size_t p = 0; p < pieces.size(); ++p) {
        const bool is_there = pieces[p].rank != rank || numel_of(pieces[p].region) == 0;
        if (!is_there) expected[t].emplace(p, file);
      }
    }
    EXPECT_EQ(missing.pieces, expected);
  }
  EXPECT_EQ(num_values, open_folder(path)->contents().values.size());
}

TEST(DcpTest, VerifyReportsEveryDamagedFileAndGoesOn) {
  MemoryFiles files = memory_files_of(fixture("dcp/valid/fsdp1_adamw"));
  files.remove("__1_0.distcp");
  const auto reader = open_dcp(files, "ck");
  const std::vector<Finding> missing = findings_of(*reader);
  ASSERT_EQ(missing.size(), 1u);  // not one for each item in it
  EXPECT_EQ(missing[0].rule, "structure");
  EXPECT_THAT(missing[0].where.path, HasSubstr("__1_0.distcp"));

  MemoryFiles cut = memory_files_of(fixture("dcp/valid/fsdp1_adamw"));
  cut["__3_0.distcp"].resize(cut["__3_0.distcp"].size() - 1);
  const std::vector<Finding> truncated = findings_of(*open_dcp(cut, "ck"));
  ASSERT_EQ(truncated.size(), 1u);
  EXPECT_FALSE(truncated[0].where.fqn.empty());
}

TEST(DcpTest, FlippedBitInATensorIsFound) {
  const std::string path = fixture("dcp/valid/world1");
  const auto sound = open_folder(path);
  for (std::size_t t = 0; t < sound->contents().tensors.size(); ++t) {
    const TensorEntry& tensor = sound->contents().tensors[t];
    if (tensor.meta.numel() == 0) continue;
    const PieceStorage storage = sound->piece_storage(t, 0);
    MemoryFiles files = memory_files_of(path);
    char& byte = files[storage.file][storage.byte_range->begin + storage.stored_nbytes / 2];
    byte = static_cast<char>(byte ^ 0x10);
    const auto damaged = open_dcp(files, "ck");
    EXPECT_THAT([&] { test::whole_tensor(*damaged, t); },
                ThrowsError(ErrorKind::corruption, tensor.meta.fqn));
    const std::vector<Finding> findings = findings_of(*damaged);
    ASSERT_EQ(findings.size(), 1u);
    EXPECT_EQ(findings[0].rule, "checksum");
    EXPECT_EQ(findings[0].where.fqn, tensor.meta.fqn);
  }
}

TEST(DcpTest, RangesOfAPieceAreReadAlone) {
  const auto reader = open_folder(fixture("dcp/valid/fsdp2_tp"));
  for (std::size_t t = 0; t < reader->contents().tensors.size(); ++t) {
    const TensorEntry& tensor = reader->contents().tensors[t];
    const std::uint64_t element_nbytes = itemsize(tensor.meta.dtype);
    for (std::size_t p = 0; p < tensor.pieces.size(); ++p) {
      const std::int64_t numel = numel_of(tensor.pieces[p].region);
      test::Bytes whole(static_cast<std::size_t>(numel) * element_nbytes);
      reader->read_piece(t, p, {0, numel}, whole);
      for (std::int64_t begin = 0; begin < numel; begin += 3) {
        const std::int64_t end = std::min(begin + 5, numel);
        test::Bytes read(static_cast<std::size_t>(end - begin) * element_nbytes);
        reader->read_piece(t, p, {begin, end}, read);
        EXPECT_TRUE(std::equal(read.begin(), read.end(),
                               whole.begin() + begin * static_cast<std::int64_t>(element_nbytes)));
      }
    }
  }
}

// Every truncation and every flipped bit of `.metadata` is refused or read, without a crash.
TEST(DcpTest, DamagedMetadataNeverDoesWorseThanBeingRefused) {
  const std::string path = fixture("dcp/v2.11/sharded_tensor");
  const std::string sound = read_file(FileSystem::posix(), path + "/.metadata", 1 << 20);
  std::size_t num_refused = 0;
  const auto try_to_parse = [&](const std::string& bytes) {
    try {
      dcp::parse_metadata({bytes.begin(), bytes.end()}, "x");
    } catch (const Error&) {
      ++num_refused;
    }
  };
  for (std::size_t nbytes = 0; nbytes < sound.size(); ++nbytes) {
    try_to_parse(sound.substr(0, nbytes));
  }
  EXPECT_EQ(num_refused, sound.size());
  for (std::size_t i = 0; i < sound.size() * 8; ++i) {
    std::string damaged = sound;
    damaged[i / 8] = static_cast<char>(damaged[i / 8] ^ (1 << i % 8));
    try_to_parse(damaged);
  }
}

enum class DictOrder { items_first, places_first };

/// Returns `.metadata` of one [2] tensor `w`. Its memory format is pickled as Python 3.11.2 pickles
/// an enumerator: as `getattr(<enumeration>, "TORCH_CONTIGUOUS_FORMAT")`.
std::string metadata_with_enumerator_by_name(std::string_view enumeration,
                                             DictOrder order = DictOrder::items_first,
                                             std::int64_t item_nbytes = 100) {
  using pickle::Pickler;
  constexpr std::string_view kModule = "torch.distributed.checkpoint.metadata";
  Pickler p(4);
  const auto begin = [&](std::string_view module, std::string_view name) {
    p.global(module, name);
    p.empty_tuple();
    p.new_object();
    p.empty_dict();
    p.mark();
  };
  const auto end = [&] {
    p.set_items_from_mark();
    p.build();
  };
  const auto size = [&](std::int64_t value) {
    p.global("torch", "Size");
    p.integer(value);
    p.tuple1();
    p.tuple1();
    p.reduce();
  };
  const auto items = [&] {
    p.text("state_dict_metadata");
    p.empty_dict();
    p.mark();
    p.text("w");
    begin(kModule, "TensorStorageMetadata");
    p.text("properties");
    p.global(kModule, "TensorProperties");
    p.empty_tuple();
    p.new_object();
    p.mark();
    p.global("torch", "float32");
    p.global("torch.serialization", "_get_layout");
    p.text("torch.strided");
    p.tuple1();
    p.reduce();
    p.boolean(false);
    p.global("builtins", "getattr");
    p.global(kModule, enumeration);
    p.text("TORCH_CONTIGUOUS_FORMAT");
    p.tuple2();
    p.reduce();
    p.boolean(false);
    p.tuple_from_mark();
    p.build();
    p.text("size");
    size(2);
    p.text("chunks");
    p.empty_list();
    begin(kModule, "ChunkStorageMetadata");
    p.text("offsets");
    size(0);
    p.text("sizes");
    size(2);
    end();
    p.append();
    end();
    p.set_items_from_mark();
  };
  const auto places = [&] {
    p.text("storage_data");
    p.empty_dict();
    p.mark();
    begin(kModule, "MetadataIndex");
    p.text("fqn");
    p.text("w");
    p.text("offset");
    size(0);
    end();
    begin("torch.distributed.checkpoint.filesystem", "_StorageInfo");
    p.text("relative_path");
    p.text("part-a.bin");
    p.text("offset");
    p.integer(0);
    p.text("length");
    p.integer(item_nbytes);
    end();
    p.set_items_from_mark();
  };
  begin(kModule, "Metadata");
  if (order == DictOrder::places_first) places();
  items();
  if (order == DictOrder::items_first) places();
  end();
  return std::move(p).finish();
}

TEST(DcpTest, EnumeratorsPickledByNameAreUnderstood) {
  const std::string bytes = metadata_with_enumerator_by_name("_MEM_FORMAT_ENCODING");
  const dcp::Metadata metadata = dcp::parse_metadata({bytes.begin(), bytes.end()}, "x");
  EXPECT_EQ(metadata.contents.find_tensor("w")->pieces.size(), 1u);

  const std::string other = metadata_with_enumerator_by_name("Metadata");
  EXPECT_THAT(
      [&] {
        dcp::parse_metadata({other.begin(), other.end()}, "x");
      },
      ThrowsError(ErrorKind::corruption, "w"));
}

TEST(DcpTest, StorageDataMayComeBeforeTheTensorsThatItBelongsTo) {
  for (const DictOrder order : {DictOrder::items_first, DictOrder::places_first}) {
    const std::string bytes = metadata_with_enumerator_by_name("_MEM_FORMAT_ENCODING", order);
    const dcp::Metadata metadata = dcp::parse_metadata({bytes.begin(), bytes.end()}, "x");
    ASSERT_EQ(metadata.storage.pieces.size(), 1u);
    EXPECT_EQ(metadata.storage.pieces[0][0].nbytes, 100u);
  }
}

TEST(DcpTest, AnItemThatIsTooLongIsRefused) {
  constexpr auto kMax = static_cast<std::int64_t>(dcp::StorageInfo::kMaxNbytes);
  const auto parse = [](std::int64_t item_nbytes) {
    const std::string bytes = metadata_with_enumerator_by_name("_MEM_FORMAT_ENCODING",
                                                               DictOrder::items_first, item_nbytes);
    return dcp::parse_metadata({bytes.begin(), bytes.end()}, "x");
  };
  EXPECT_EQ(parse(kMax).storage.pieces[0][0].nbytes, static_cast<std::uint64_t>(kMax));
  EXPECT_THAT([&] { parse(kMax + 1); },
              ThrowsError(ErrorKind::corruption,
                          "length: expected at most " + std::to_string(kMax) + " bytes"));
}

TEST(DcpTest, ANameThatOccursTwiceIsRefused) {
  CheckpointContents contents;
  dcp::Storage storage;
  storage.files = {"__0_0.distcp"};
  for (int i = 0; i < 2; ++i) {
    TensorEntry& tensor = contents.tensors.emplace_back();
    tensor.meta = {"w", DType::float32, {4}};
    tensor.pieces.push_back({Box{{0}, {4}}, 0});
    storage.pieces.add(1)[0] = {.offset = 100, .nbytes = 100, .file = 0};
  }
  const std::string bytes = dcp::pickle_metadata(contents, storage);
  EXPECT_THAT(
      [&] {
        dcp::parse_metadata({bytes.begin(), bytes.end()}, "x");
      },
      ThrowsError(ErrorKind::corruption, "each name once"));
}

TEST(DcpTest, MetadataOfManyChunksIsReadWhole) {
  CheckpointContents contents;
  contents.world_size = 8;
  dcp::Storage storage;
  for (std::uint32_t rank = 0; rank < 8; ++rank) {
    storage.files.push_back("__" + std::to_string(rank) + "_0.distcp");
  }
  for (int t = 0; t < 10000; ++t) {
    std::string fqn = "model.layers." + std::to_string(100000 + t) + ".weight";
    TensorEntry tensor;
    tensor.key_path = {"model", fqn.substr(6)};
    tensor.meta = {std::move(fqn), DType::bfloat16, {4096, 1024}};
    std::vector<dcp::StorageInfo> places;
    for (std::uint32_t rank = 0; rank < 8; ++rank) {
      tensor.pieces.push_back({Box{{512 * rank, 0}, {512, 1024}}, static_cast<int>(rank)});
      places.push_back({.offset = 1049600 * static_cast<std::uint64_t>(t),
                        .nbytes = 1049600,
                        .file = rank & (dcp::StorageInfo::kMaxFiles - 1)});
    }
    contents.tensors.push_back(std::move(tensor));
    storage.pieces.add(places);
  }
  const std::string bytes = dcp::pickle_metadata(contents, storage);
  const dcp::Metadata metadata = dcp::parse_metadata({bytes.begin(), bytes.end()}, "x");
  EXPECT_EQ(metadata.contents.tensors.size(), 10000u);
  EXPECT_EQ(metadata.contents.tensors.back().pieces, contents.tensors.back().pieces);
  EXPECT_EQ(metadata.storage.pieces.items().back().offset, storage.pieces.items().back().offset);
}

// The writer

/// Writes what `source` holds, its values and tied weights included, on `num_threads` threads.
void write(const CheckpointReader& source, const std::string& path, int num_threads) {
  std::vector<Value> values;
  for (std::size_t v = 0; v < source.contents().values.size(); ++v) {
    values.push_back(source.read_value(v));
  }
  const auto writer = create_dcp(FileSystem::posix(), path, source.contents(), std::move(values));
  test::copy_checkpoint(source, *writer, num_threads);
}

TEST(DcpTest, WhatIsWrittenHoldsWhatWasRead) {
  const TemporaryDirectory directory;
  for (const std::string& path : valid_checkpoints()) {
    SCOPED_TRACE(path);
    const std::string copy = directory / "copy";
    const auto source = open_folder(path);
    write(*source, copy, 2);
    const auto reader = open_folder(copy);
    expect_holds(*reader, path + ".expect.json");
    expect_covered(*reader);
    EXPECT_TRUE(findings_of(*reader).empty());
    EXPECT_EQ(reader->contents().tensors.size(), source->contents().tensors.size());
    for (std::size_t t = 0; t < source->contents().tensors.size(); ++t) {
      EXPECT_EQ(reader->contents().tensors[t].key_path, source->contents().tensors[t].key_path);
    }
    std::filesystem::remove_all(copy);
  }
}

TEST(DcpTest, WritingWhatWasWrittenGivesTheSameBytes) {
  const TemporaryDirectory directory;
  write(*open_folder(fixture("dcp/valid/fsdp2_tp")), directory / "first", 2);
  write(*open_folder(directory / "first"), directory / "second", 3);
  const MemoryFiles first = memory_files_of(directory / "first");
  EXPECT_TRUE(first.files() == memory_files_of(directory / "second").files());
}

TEST(DcpTest, ValuesOfEveryKindComeBack) {
  const TemporaryDirectory directory;
  MemoryCheckpoint memory;
  const std::vector<std::pair<std::string, Value>> values = {
      {"big", Value::BigInt{"-1180591620717411303424"}},
      {"bytes", Value::Bytes{std::string("a\xff\0z", 4)}},
      {"dict", Value::Dict{{"x", 1}, {2, Value::Tuple{{0.5, Value()}}}}},
      {"dtype", Value::Symbol{"torch.bfloat16"}},
      {"empty", Value::Dict{}},
      {"int64", std::int64_t{1} << 40},
      {"list", Value::List{true, false, -1, 255, 256, 65536, "h\xc3\xa9"}},
      {"set", Value::Set{{1, 2}}},
  };
  for (const auto& [name, value] : values) memory.add_value(name, value);
  write(memory, directory / "values", 1);
  const auto reader = open_folder(directory / "values");
  for (std::size_t v = 0; v < values.size(); ++v) {
    EXPECT_EQ(reader->contents().values[v].name, values[v].first);
    EXPECT_EQ(reader->read_value(v), values[v].second) << values[v].first;
  }
}

TEST(DcpTest, ListAtTheRootBecomesADict) {
  const TemporaryDirectory directory;
  MemoryCheckpoint memory;
  memory.add({"0.k", DType::uint8, {1}}, test::Bytes(1)).key_path = {std::int64_t{0}, "k"};
  memory.add({"1.0", DType::uint8, {1}}, test::Bytes(1)).key_path = {std::int64_t{1},
                                                                     std::int64_t{0}};
  write(memory, directory / "list", 1);
  const auto reader = open_folder(directory / "list");
  EXPECT_EQ(reader->contents().find_tensor("0.k")->key_path, (KeyPath{"0", "k"}));
  EXPECT_EQ(reader->contents().find_tensor("1.0")->key_path, (KeyPath{"1", std::int64_t{0}}));
}

TEST(DcpTest, APositionThatAListLacksBecomesNone) {
  const TemporaryDirectory directory;
  MemoryCheckpoint memory;
  memory.add({"l.1", DType::uint8, {1}}, test::Bytes(1)).key_path = {"l", 1};
  memory.add({"l.3.a.1", DType::uint8, {1}}, test::Bytes(1)).key_path = {"l", 3, "a", 1};
  memory.add_value("l.2", 7).key_path = {"l", 2};
  memory.add_value("z", 8);
  for (TensorEntry& tensor : memory.contents_for_change().tensors) tensor.dict_order = 1;
  memory.contents_for_change().values[0].dict_order = 1;  // of l.2; z comes before the list
  write(memory, directory / "list", 1);
  const auto reader = open_folder(directory / "list");
  std::map<std::string, Value> values;
  for (std::size_t v = 0; v < reader->contents().values.size(); ++v) {
    values.emplace(reader->contents().values[v].name, reader->read_value(v));
  }
  EXPECT_THAT(values,
              testing::ElementsAre(testing::Pair("l.0", Value()), testing::Pair("l.2", 7),
                                   testing::Pair("l.3.a.0", Value()), testing::Pair("z", 8)));
  EXPECT_EQ(reader->contents().values[0].key_path, (KeyPath{"l", 0}));
  // The tensors, then the values, are numbered: z, l.0, l.1, l.2, l.3.a.0, l.3.a.1.
  EXPECT_THAT(entries_in_dict_order(reader->contents()), testing::ElementsAre(5, 2, 0, 3, 4, 1));

  memory.add_value("l.4000000", 1).key_path = {"l", 4000000};
  EXPECT_THAT(
      [&] { write(memory, directory / "far", 1); },
      ThrowsError(ErrorKind::unsupported, "l.4000000: position in a list: expected at most"));
}

TEST(DcpTest, KeysThatAreNoStringsBecomeTheirText) {
  const TemporaryDirectory directory;
  MemoryCheckpoint memory;
  memory.add({"state.0.k", DType::uint8, {1}}, test::Bytes(1)).key_path = {"state", *dict_key(0),
                                                                           "k"};
  write(memory, directory / "keys", 1);
  EXPECT_EQ(open_folder(directory / "keys")->contents().find_tensor("state.0.k")->key_path,
            (KeyPath{"state", "0", "k"}));
}

TEST(DcpTest, LargeTensorsBeginAtAPageOfTheirFile) {
  const TemporaryDirectory directory;
  MemoryCheckpoint memory;
  memory.add_value("step", 1);
  memory.add({"a", DType::uint8, {3}}, test::Bytes(3, std::byte{1}));
  memory.add({"b", DType::uint8, {300000}}, test::Bytes(300000, std::byte{2}));
  memory.add({"c", DType::uint8, {300000}}, test::Bytes(300000, std::byte{3}));
  write(memory, directory / "pages", 1);
  const auto reader = open_folder(directory / "pages");
  for (const std::size_t t : {1U, 2U}) {
    EXPECT_EQ(reader->piece_storage(t, 0).byte_range->begin % 4096, 0u);
    EXPECT_EQ(test::whole_tensor(*reader, t), test::whole_tensor(memory, t));
  }
}

MemoryCheckpoint small_checkpoint() {
  MemoryCheckpoint memory("memory", 2);
  memory.add({"a", DType::uint8, {3}}, test::Bytes(3, std::byte{1}),
             {{Box{{0}, {2}}, 0}, {Box{{2}, {1}}, 1}});
  memory.add({"b", DType::uint8, {0}}, {});
  memory.add_value("step", 1);
  return memory;
}

void write_small(FileSystem& fs, const std::string& path) {
  const MemoryCheckpoint memory = small_checkpoint();
  const auto writer =
      create_dcp(fs, path, memory.contents(), {memory.read_value(0)}, OverwritePolicy::replace);
  test::copy_checkpoint(memory, *writer);
}

TEST(DcpTest, MetadataIsWrittenLastAndEveryFileIsSyncedBeforeTheCheckpointAppears) {
  const TemporaryDirectory directory;
  test::FaultFileSystem watched(FileSystem::posix(), directory.path());
  write_small(watched, directory / "ck");
  EXPECT_EQ(watched.transcript(),
            "make_directory ck.partial\n"
            "create ck.partial.journal\n"
            "write ck.partial.journal [0, 18)\n"
            "close ck.partial.journal\n"
            "create ck.partial/__0_0.distcp\n"
            "resize ck.partial/__0_0.distcp 2436\n"
            "write ck.partial/__0_0.distcp [0, 644)\n"
            "write ck.partial/__0_0.distcp [1540, 1860)\n"
            "write ck.partial/__0_0.distcp [1860, 2436)\n"
            "write ck.partial/__0_0.distcp [964, 966)\n"
            "write ck.partial/__0_0.distcp [644, 964)\n"
            "write ck.partial/__0_0.distcp [966, 1540)\n"
            "sync ck.partial/__0_0.distcp\n"
            "close ck.partial/__0_0.distcp\n"
            "create ck.partial/__1_0.distcp\n"
            "resize ck.partial/__1_0.distcp 896\n"
            "write ck.partial/__1_0.distcp [320, 321)\n"
            "write ck.partial/__1_0.distcp [0, 320)\n"
            "write ck.partial/__1_0.distcp [321, 896)\n"
            "sync ck.partial/__1_0.distcp\n"
            "close ck.partial/__1_0.distcp\n"
            "create ck.partial/.metadata\n"
            "write ck.partial/.metadata [0, 910)\n"
            "sync ck.partial/.metadata\n"
            "close ck.partial/.metadata\n"
            "sync_directory ck.partial\n"
            "rename ck.partial ck\n"
            "sync_directory .\n"
            "remove_all ck.partial.journal\n");
}

TEST(DcpTest, WhateverFailsTheOldCheckpointStaysWhole) {
  const TemporaryDirectory directory;
  const auto still_holds_old = [&] {
    const auto reader = open_folder(directory / "ck");
    return reader->contents().values.size() == 1 && reader->read_value(0) == Value("old") &&
           FileSystem::posix().list_directory(directory.path()).size() == 1;
  };
  MemoryCheckpoint old;
  old.add_value("x", "old");
  write(old, directory / "ck", 1);
  bool succeeded = false;
  for (std::int64_t i = 0; !succeeded; ++i) {
    SCOPED_TRACE("operation " + std::to_string(i));
    ASSERT_LT(i, 200);
    test::FaultFileSystem faulty(FileSystem::posix(), directory.path());
    faulty.fail_operation(i);
    try {
      write_small(faulty, directory / "ck");
      succeeded = true;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::io);
      EXPECT_TRUE(still_holds_old());
    }
  }
  EXPECT_EQ(open_folder(directory / "ck")->contents().tensors.size(), 2u);
}

/// Returns an item of `numel` floats that are all one stored float, by a stride of 0.
std::string expanded_item(std::int64_t numel) {
  pickle::Pickler pickler(2);
  pickler.global("torch._utils", "_rebuild_tensor_v2");
  pickler.mark();
  pickler.mark();
  pickler.interned("storage");
  pickler.global("torch", "FloatStorage");
  pickler.interned("0");
  pickler.interned("cpu");
  pickler.integer(1);
  pickler.tuple_from_mark();
  pickler.persistent_id();
  pickler.integer(0);  // offset
  for (const std::int64_t item : {numel, std::int64_t{0}}) {
    pickler.integer(item);
    pickler.tuple1();
  }
  pickler.boolean(false);
  pickler.none();  // hooks
  pickler.tuple_from_mark();
  pickler.reduce();
  return test::zip_bytes({{.name = "x/data.pkl", .data = std::move(pickler).finish()},
                          {.name = "x/data/0", .data = std::string(4, '\1')}});
}

/// Writes a checkpoint of three tensors of 512 MiB into a data file of at least `file_nbytes`. The
/// file stores one float, which is every element of the tensors.
void write_expanded(const TemporaryDirectory& directory, const std::string& metadata_name,
                    std::uint64_t file_nbytes) {
  constexpr std::int64_t kNumel = std::int64_t{1} << 27;  // 512 MiB
  const std::string item = expanded_item(kNumel);
  CheckpointContents contents;
  dcp::Storage storage{.files = {"__0_0.distcp"}, .ranks = {0}, .pieces = {}, .values = {}};
  for (const char* name : {"a", "b", "c"}) {
    contents.tensors.push_back({.meta = {name, DType::float32, {kNumel}},
                                .pieces = {{.region = Box{{0}, {kNumel}}, .rank = 0}}});
    storage.pieces.add(1)[0] = {
        .offset = 0, .nbytes = item.size() & dcp::StorageInfo::kMaxNbytes, .file = 0};
  }
  const auto put = [&](const std::string& name, std::string_view bytes, std::uint64_t nbytes) {
    const auto file = FileSystem::posix().create(directory / name);
    file->write_at(0, std::as_bytes(std::span(bytes)));
    file->resize(std::max<std::uint64_t>(bytes.size(), nbytes));
    file->close();
  };
  put(metadata_name, dcp::pickle_metadata(contents, storage), 0);
  put("__0_0.distcp", item, file_nbytes);
}

TEST(DcpTest, ExpandedTensorsAreBelievedUpToALimitOfAllFiles) {
  const TemporaryDirectory directory;
  write_expanded(directory, ".metadata", 0);
  const auto reader = open_folder(directory.path());
  std::vector<std::byte> element(4);
  EXPECT_NO_THROW(reader->read_piece(0, 0, {5, 6}, element));
  EXPECT_NO_THROW(reader->read_piece(1, 0, {5, 6}, element));
  EXPECT_THAT(
      [&] {
        reader->read_piece(2, 0, {5, 6}, element);
      },
      ThrowsError(ErrorKind::unsupported, "c: expanded size: expected at most"));
}

TEST(DcpTest, TheLimitOfExpandedTensorsCountsTheFilesBesideTheMetadataOfOneRank) {
  for (const std::string metadata_name : {".metadata", "__0.metadata"}) {
    SCOPED_TRACE(metadata_name);
    const TemporaryDirectory directory;
    write_expanded(directory, metadata_name, std::uint64_t{128} << 20);
    const auto reader =
        open_folder(metadata_name == ".metadata" ? directory.path() : directory / metadata_name);
    std::vector<std::byte> element(4);
    EXPECT_NO_THROW(reader->read_piece(2, 0, {5, 6}, element));
  }
}

}  // namespace
}  // namespace tessera::formats
