#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "conformance/conformance.h"
#include "formats/torch_zip.h"
#include "formats/zip/zip_reader.h"
#include "support/copy_checkpoint.h"
#include "support/error_matchers.h"
#include "support/fault_file_system.h"
#include "support/memory_checkpoint.h"
#include "support/temporary_directory.h"
#include "tessera/base/error.h"

// Shows E2, E9, E11, E14. Writing torch.save: aliases, equal bytes, nesting.
namespace tessera::formats {
namespace {

using std::string_literals::operator""s;
using test::bytes_of;
using test::MemoryCheckpoint;
using test::patterned_bytes;
using test::ThrowsError;
using testing::ElementsAre;
using testing::IsEmpty;

class TorchZipWriterTest : public testing::Test {
 protected:
  std::unique_ptr<CheckpointWriter> create(const MemoryCheckpoint& source,
                                           const std::string& name = "x.pt") {
    std::vector<Value> values;
    for (std::size_t i = 0; i < source.contents().values.size(); ++i) {
      values.push_back(source.read_value(i));
    }
    return create_torch_zip(fs_, tmp_ / name, source.contents(), std::move(values));
  }

  std::unique_ptr<CheckpointReader> round_trip(const MemoryCheckpoint& source) {
    test::copy_checkpoint(source, *create(source));
    return open_torch_zip(fs_, tmp_ / "x.pt");
  }

  std::string content_of(const std::string& name) const {
    return read_file(fs_, tmp_ / name, std::uint64_t{1} << 30);
  }

  FileSystem& fs_ = FileSystem::posix();
  test::TemporaryDirectory tmp_;
};

void add_byte(MemoryCheckpoint& checkpoint, const std::string& name, KeyPath key_path = {}) {
  checkpoint.add({name, DType::uint8, {1}}, bytes_of<std::uint8_t>({1})).key_path =
      std::move(key_path);
}

/// All names with what they are, in order of kind and name: `tensor a.b`, `value c=1`.
std::vector<std::string> shown(const CheckpointReader& reader) {
  const CheckpointContents& contents = reader.contents();
  std::vector<std::string> lines;
  for (const TensorEntry& tensor : contents.tensors) lines.push_back("tensor " + tensor.meta.fqn);
  for (const Alias& alias : contents.aliases) {
    lines.push_back("alias " + alias.fqn + " of " + alias.target);
  }
  for (std::size_t i = 0; i < contents.values.size(); ++i) {
    lines.push_back("value " + contents.values[i].name + "=" +
                    value_to_string(reader.read_value(i)));
  }
  return lines;
}

TEST_F(TorchZipWriterTest, TheArchiveIsLaidOutAsTorchDoes) {
  MemoryCheckpoint source;
  source.add({"a", DType::float32, {3}}, bytes_of<float>({1, 2, 3}));
  source.add({"b", DType::int64, {0, 2}}, {});
  source.add({"c", DType::int8, {256 << 10}}, patterned_bytes(256 << 10, 1));
  test::copy_checkpoint(source, *create(source));
  const auto file = fs_.open(tmp_ / "x.pt");
  const zip::ZipReader archive(*file, {0, file->nbytes()});
  std::vector<std::string> names;
  for (std::size_t i = 0; i < archive.members().size(); ++i) {
    names.emplace_back(archive.members()[i].name);
    const bool is_large = archive.members()[i].nbytes >= 256 << 10;
    EXPECT_EQ(archive.data_range(i).begin % (is_large ? 4096 : 64), 0U);
    EXPECT_EQ(archive.members()[i].crc32, archive.compute_crc(i, [](std::uint64_t) {}));
  }
  EXPECT_THAT(names, ElementsAre("archive/data.pkl", "archive/byteorder", "archive/data/0",
                                 "archive/data/1", "archive/data/2", "archive/version",
                                 "archive/.data/serialization_id"));
}

TEST_F(TorchZipWriterTest, KeyPathsBecomeNestedDictsAndLists) {
  MemoryCheckpoint source;
  add_byte(source, "a.b");
  add_byte(source, "list.0", {"list", 0});
  add_byte(source, "list.10.k.v", {"list", 10, "k.v"});
  for (int i = 1; i < 10; ++i) {
    source.add_value("list." + std::to_string(i), i).key_path = {"list", i};
  }
  const auto reader = round_trip(source);
  EXPECT_EQ(reader->contents().find_tensor("a.b")->key_path, KeyPath{});
  EXPECT_EQ(reader->contents().find_tensor("list.10.k.v")->key_path, (KeyPath{"list", 10, "k.v"}));
  test::expect_equal_checkpoints(*reader, source);
}

// `None` in place of the items that ranks share would be rank 1's own value.
TEST_F(TorchZipWriterTest, ARanksOwnItemsOfAListKeepTheirPlaces) {
  MemoryCheckpoint source;
  const auto add_value = [&](const std::string& name, KeyPath path) {
    source.add_value(name, 7).key_path = std::move(path);
  };
  add_byte(source, "per_rank.1.all.0", {"per_rank", "1", "all", 0});
  add_value("per_rank.1.all.1", {"per_rank", "1", "all", 1});
  add_byte(source, "per_rank.1.rng.2", {"per_rank", "1", "rng", 2});
  add_value("per_rank.1.values.0", {"per_rank", "1", "values", 0});
  add_value("per_rank.1.values.1", {"per_rank", "1", "values", 1});
  const auto reader = round_trip(source);
  EXPECT_THAT(shown(*reader), ElementsAre("tensor per_rank.1.all.0", "tensor per_rank.1.rng.2",
                                          "value per_rank.1.all.1=7", "value per_rank.1.values.0=7",
                                          "value per_rank.1.values.1=7"));
  EXPECT_EQ(reader->contents().find_tensor("per_rank.1.all.0")->key_path.back(), Key(0));
  EXPECT_EQ(reader->contents().find_tensor("per_rank.1.rng.2")->key_path.back(),
            Key(*dict_key(Value(2))));
}

TEST_F(TorchZipWriterTest, KeysOfADictThatAreNoStringsStayWhatTheyAre) {
  MemoryCheckpoint source;
  Value nested = 1;
  for (int depth = 0; depth < 40; ++depth) nested = Value::Tuple{{nested}};
  const std::vector<Value> keys = {nested,
                                   10,
                                   -3,
                                   true,
                                   Value(),
                                   2.5,
                                   Value::Tuple{{1, "a"}},
                                   "0",
                                   Value::Bytes{"\xff"},
                                   INFINITY,
                                   Value::Symbol{"torch.float16"}};
  for (const Value& key : keys) {
    const KeyPath path = {"state", *dict_key(key), "x"};
    add_byte(source, spell(path), path);
  }
  const auto reader = round_trip(source);
  for (const Value& key : keys) {
    const KeyPath path = {"state", *dict_key(key), "x"};
    const TensorEntry* found = reader->contents().find_tensor(spell(path));
    ASSERT_NE(found, nullptr) << spell(path);
    EXPECT_EQ(found->key_path, path);
  }
}

TEST_F(TorchZipWriterTest, AListCanBeAllThereIs) {
  MemoryCheckpoint source;
  add_byte(source, "0", {0});
  add_byte(source, "1.k", {1, "k"});
  source.add_value("2", "x").key_path = {2};
  test::expect_equal_checkpoints(*round_trip(source), source);
}

TEST_F(TorchZipWriterTest, PositionsWithoutAnEntryAreNone) {
  MemoryCheckpoint source;
  add_byte(source, "list.2", {"list", 2});
  EXPECT_THAT(shown(*round_trip(source)),
              ElementsAre("tensor list.2", "value list.0=None", "value list.1=None"));
}

TEST_F(TorchZipWriterTest, AnAliasSharesTheStorageWhicheverNameComesFirst) {
  MemoryCheckpoint source;
  source.add({"m.b", DType::int16, {2}}, bytes_of<std::int16_t>({1, 2})).key_path = {"m", "b"};
  source.add_alias("a", "m.b");
  source.add_alias("m.c", "m.b");
  source.contents_for_change().aliases[1].key_path = {"m", "c"};
  const auto reader = round_trip(source);
  ASSERT_THAT(shown(*reader), ElementsAre("tensor a", "alias m.b of a", "alias m.c of a"));
  EXPECT_EQ(reader->contents().aliases[1].key_path, (KeyPath{"m", "c"}));
  EXPECT_EQ(test::whole_tensor(*reader, 0), bytes_of<std::int16_t>({1, 2}));
}

TEST_F(TorchZipWriterTest, DictsInValuesAreOpenedByReadersAsAnyOtherDict) {
  MemoryCheckpoint source;
  source.add_value("optim", Value::Dict{{"lr", 0.5}, {3, Value::List{1, 2}}});
  source.add_value("plain", Value::List{1, Value::Tuple{{2, 3}}});
  EXPECT_THAT(shown(*round_trip(source)),
              ElementsAre("value optim.3=[1, 2]", "value optim.lr=0.5", "value plain=[1, (2, 3)]"));
}

TEST_F(TorchZipWriterTest, BytesDoNotDependOnTheOrderOfBlocks) {
  MemoryCheckpoint source;
  const std::uint64_t nbytes = (std::uint64_t{20} << 20) + 2;  // six blocks, the last one short
  source.add({"large", DType::bfloat16, {static_cast<std::int64_t>(nbytes / 2)}},
             patterned_bytes(nbytes, 1));
  source.add({"small", DType::uint8, {3}}, patterned_bytes(3, 2));
  test::copy_checkpoint(source, *create(source, "in_order.pt"));

  const auto writer = create(source, "backwards.pt");
  struct Block {
    CheckpointWriter::PieceId piece;
    FlatRange range;
  };
  std::vector<Block> blocks;
  for (const auto piece : writer->write_order()) {
    const std::int64_t numel = source.contents().tensors[piece.tensor_index].meta.numel();
    const std::int64_t block_numel = writer->block_numel(piece);
    for (std::int64_t begin = 0; begin < numel; begin += block_numel) {
      blocks.push_back({piece, {begin, std::min(begin + block_numel, numel)}});
    }
  }
  ASSERT_EQ(blocks.size(), 7U);
  std::ranges::reverse(blocks);
  const auto write = [&](std::size_t first) {
    for (std::size_t i = first; i < blocks.size(); i += 2) {
      const auto& [piece, range] = blocks[i];
      const TensorMeta& meta = source.contents().tensors[piece.tensor_index].meta;
      test::Bytes bytes(static_cast<std::size_t>(range.numel()) * itemsize(meta.dtype));
      source.read_piece(piece.tensor_index, 0, range, bytes);
      writer->write_block(piece, range.begin, bytes);
    }
  };
  std::thread other([&] { write(1); });
  write(0);
  other.join();
  writer->commit();

  EXPECT_TRUE(content_of("in_order.pt") == content_of("backwards.pt"));
  const auto reader = open_torch_zip(fs_, tmp_ / "backwards.pt");
  reader->verify([](const Finding& finding) { ADD_FAILURE() << finding.found; },
                 [](std::uint64_t) {});
  EXPECT_TRUE(test::whole_tensor(*reader, 0) == patterned_bytes(nbytes, 1));
}

TEST_F(TorchZipWriterTest, MoreMembersThanSixteenBitsCount) {
  MemoryCheckpoint source;
  CheckpointContents contents;
  const std::int64_t num_tensors = 66'000;
  for (std::int64_t i = 0; i < num_tensors; ++i) {
    contents.tensors.push_back({.meta = {"t" + std::to_string(100'000 + i), DType::uint8, {1}},
                                .pieces = {{whole_box(Shape{1}), 0}}});
  }
  const auto writer = create_torch_zip(fs_, tmp_ / "x.pt", contents, {});
  for (std::size_t i = 0; i < contents.tensors.size(); ++i) {
    writer->write_block({i, 0}, 0, bytes_of<std::uint8_t>({static_cast<std::uint8_t>(i)}));
  }
  writer->commit();
  const auto reader = open_torch_zip(fs_, tmp_ / "x.pt");
  ASSERT_EQ(reader->contents().tensors.size(), contents.tensors.size());
  EXPECT_EQ(test::whole_tensor(*reader, 65'999), bytes_of<std::uint8_t>({65'999 % 256}));
}

TEST_F(TorchZipWriterTest, WhatCannotBeWrittenIsRefusedByNameAndLeavesNothing) {
  struct Case {
    std::string message;
    ErrorKind kind;
    std::function<void(MemoryCheckpoint&)> fill;
  };
  const auto invalid = ErrorKind::invalid_argument;
  const auto unsupported = ErrorKind::unsupported;
  const Case cases[] = {
      {"w: pieces: expected one piece, the whole tensor, found 2 pieces (torch.save is written "
       "unsharded)",
       invalid,
       [](auto& source) {
         source.add({"w", DType::uint8, {2}}, test::Bytes(2),
                    {{Box{{0}, {1}}, 0}, {Box{{1}, {1}}, 1}});
       }},
      {"a.c: key path: expected keys that give the name when joined by dots, found keys that give "
       "a.b",
       invalid,
       [](auto& source) {
         add_byte(source, "a.c", {"a", "b"});
       }},
      {"a.1.0: keys of a dict: expected keys that differ in Python, found 1.0, which equals "
       "another key",
       invalid,
       [](auto& source) {
         add_byte(source, "a.1", {"a", NonStringKey{"1"}});
         add_byte(source, "a.1.0", {"a", NonStringKey{"1.0"}});
       }},
      {"a.b: key path: expected a value at a, found a dict", invalid,
       [](auto& source) {
         add_byte(source, "a.b", {"a", "b"});
         source.add_value("a", 1);
       }},
      {"a.b: key path: expected a list at a, found a dict", invalid,
       [](auto& source) {
         add_byte(source, "a.0", {"a", 0});
         add_byte(source, "a.b", {"a", "b"});
       }},
      {"tied: key path: expected keys that give the name when joined by dots", invalid,
       [](auto& source) {
         add_byte(source, "w");
         source.add_alias("tied", "w");
         source.contents_for_change().aliases[0].key_path = {"other"};
       }},
      {"name: expected UTF-8", invalid, [](auto& source) { add_byte(source, "\xff"); }},
      {"l.-1: position in a list: expected 0 or more, found -1", invalid,
       [](auto& source) {
         add_byte(source, "l.-1", {"l", -1});
       }},
      {"l.9000000000: position in a list: expected at most 1048576", unsupported,
       [](auto& source) {
         add_byte(source, "l.9000000000", {"l", 9'000'000'000});
       }},
      {"key path: expected at most 64 keys, found 5000", invalid,
       [](auto& source) {
         const KeyPath path(5000, "k"s);
         add_byte(source, spell(path), path);
       }},
      {"v: pickle: expected items of a set that Python can hash, found a list", unsupported,
       [](auto& source) {
         source.add_value("v", Value::Set{{Value::Tuple{{1, Value::List{2}}}}});
       }},
      {"optim: the constant torch.no_such_thing cannot be pickled", unsupported,
       [](auto& source) { source.add_value("optim", Value::Symbol{"torch.no_such_thing"}); }},
      {"a.b: a torch.save file with these contents could not be read: flattened name: expected one "
       "entry, found "
       "two, ['a']['b'] and ['a.b'] (save one of them under another key)",
       unsupported,
       [](auto& source) {
         add_byte(source, "a.b");
         source.add_value("a", Value::Dict{{"b", 1}});
       }},
      {"deep: a torch.save file with these contents could not be read: ", unsupported,
       [](auto& source) {
         Value deep = 1;
         for (int i = 0; i < 70; ++i) deep = Value::Tuple{{std::move(deep)}};
         source.add_value("deep", std::move(deep));
       }},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.message);
    MemoryCheckpoint source;
    c.fill(source);
    EXPECT_THAT([&] { create(source); }, ThrowsError(c.kind, c.message));
    EXPECT_THAT(fs_.list_directory(tmp_.path()), IsEmpty());
  }
}

TEST_F(TorchZipWriterTest, HeadersAreWrittenLastAndTheFileAppearsWhole) {
  test::FaultFileSystem watched(fs_, tmp_.path());
  MemoryCheckpoint source;
  add_byte(source, "x");
  const auto writer = create_torch_zip(watched, tmp_ / "x.pt", source.contents(), {});
  test::copy_checkpoint(source, *writer);
  EXPECT_EQ(watched.transcript(),
            "create x.pt.partial\n"
            "close x.pt.partial\n"
            "create x.pt.partial.journal\n"
            "write x.pt.partial.journal [0, 18)\n"
            "close x.pt.partial.journal\n"
            "open_for_update x.pt.partial\n"
            "resize x.pt.partial 960\n"
            "write x.pt.partial [384, 385)\n"
            "write x.pt.partial [0, 384)\n"
            "write x.pt.partial [385, 960)\n"
            "sync x.pt.partial\n"
            "close x.pt.partial\n"
            "rename x.pt.partial x.pt\n"
            "sync_directory .\n"
            "remove_all x.pt.partial.journal\n");
}

}  // namespace
}  // namespace tessera::formats
