#include "conformance/conformance.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "base/json.h"
#include "formats/dcp.h"
#include "formats/rank_files.h"
#include "formats/torch_zip.h"
#include "support/copy_checkpoint.h"
#include "support/fixtures.h"
#include "tessera/formats/create.h"
#include "tessera/formats/native.h"
#include "tessera/formats/safetensors.h"
#include "tessera/layout/strategy.h"

namespace tessera::test {

using formats::Alias;
using formats::CheckpointContents;
using formats::CheckpointReader;
using formats::KeyPath;
using formats::Piece;
using formats::StateKind;
using formats::TensorEntry;

bool FormatUnderTest::holds(DType dtype) const {
  return std::ranges::find(lacks, dtype) == lacks.end();
}

namespace {

FormatUnderTest native(std::string name, formats::NativeWriteOptions options) {
  return {.name = std::move(name),
          .destination = "checkpoint",
          .open = formats::open_native,
          .create = [options](FileSystem& fs, const std::string& path, CheckpointContents contents,
                              std::vector<Value> values, OverwritePolicy overwrite) {
            return formats::create_native(fs, path, std::move(contents), std::move(values),
                                          overwrite, options);
          }};
}

FormatUnderTest safetensors(std::string name, std::string destination,
                            formats::SafetensorsWriteOptions options) {
  return {.name = std::move(name),
          .format = formats::Format::safetensors,
          .destination = std::move(destination),
          .open = formats::open_safetensors,
          .create =
              [options](FileSystem& fs, const std::string& path, CheckpointContents contents,
                        std::vector<Value> values, OverwritePolicy overwrite) {
                return formats::create_safetensors(fs, path, std::move(contents), std::move(values),
                                                   overwrite, options);
              },
          .pieces = FormatUnderTest::Pieces::whole,
          .lacks = {DType::complex32, DType::complex128}};
}

/// Returns the rows that each rank has of a DTensor; the whole tensor if it cannot be cut.
std::vector<Piece> rows_of(const Shape& shape, int num_ranks) {
  std::vector<Piece> pieces;
  for (const Shard& shard :
       shards_of({Strategy::Sharding::dim0, 1, std::max(num_ranks, 1)}, shape)) {
    for (const int rank : shard.ranks) pieces.push_back({shard.region, rank});
  }
  return pieces;
}

bool is_opened(const Value& value) {
  if (const auto* dict = value.get_if<Value::Dict>()) return !dict->empty();
  const auto* list = value.get_if<Value::List>();
  return list != nullptr && std::ranges::any_of(*list, [](const Value& item) {
           return item.get_if<Value::Dict>() != nullptr || is_opened(item);
         });
}

/// Adds a value to `checkpoint`. Of a dict, or of a list with a dict in it, adds each entry
/// instead.
void add_opened(MemoryCheckpoint& checkpoint, const KeyPath& path, const Value& value) {
  const auto add = [&](auto key, const Value& item) {
    KeyPath item_path = path;
    item_path.emplace_back(std::move(key));
    add_opened(checkpoint, item_path, item);
  };
  if (!is_opened(value)) {
    checkpoint.add_value(formats::spell(path), value).key_path = path;
  } else if (const auto* dict = value.get_if<Value::Dict>()) {
    for (const auto& [key, item] : *dict) {
      add(formats::dict_key(key).value_or(value_to_string(key)), item);
    }
  } else {
    std::int64_t position = 0;
    for (const Value& item : *value.get_if<Value::List>()) add(position++, item);
  }
}

}  // namespace

std::vector<FormatUnderTest> formats_that_write() {
  return {native("native", {}),
          native("native_zstd", {.compression = formats::NativeWriteOptions::Compression::zstd}),
          safetensors("safetensors_file", "model.safetensors", {}),
          safetensors("safetensors_shards", "checkpoint", {.max_shard_nbytes = 64}),
          {.name = "dcp",
           .format = formats::Format::dcp,
           .destination = "checkpoint",
           .open = formats::open_dcp,
           .create = formats::create_dcp,
           .pieces = FormatUnderTest::Pieces::boxes,
           .aliases = FormatUnderTest::Extras::lost,
           .state_kinds = FormatUnderTest::Extras::lost},
          {.name = "torch_zip",
           .format = formats::Format::torch_zip,
           .destination = "checkpoint.pt",
           .open = formats::open_torch_zip,
           .create = formats::create_torch_zip,
           .pieces = FormatUnderTest::Pieces::whole,
           .state_kinds = FormatUnderTest::Extras::lost,
           .values = FormatUnderTest::Nesting::opened},
          {.name = "rank_files",
           .format = formats::Format("rank_files"),
           .destination = "checkpoint",
           .open = [](const FileSystem& fs,
                      std::string path) { return formats::open_rank_files(fs, std::move(path)); },
           .create =
               [](FileSystem& fs, const std::string& path, CheckpointContents contents,
                  std::vector<Value> values, OverwritePolicy overwrite) {
                 return formats::create_checkpoint(
                     fs, path, std::move(contents), std::move(values),
                     {.format = formats::Format("rank_files"), .overwrite = overwrite});
               },
           .pieces = FormatUnderTest::Pieces::rows,
           .state_kinds = FormatUnderTest::Extras::lost,
           .values = FormatUnderTest::Nesting::opened}};
}

std::vector<FormatUnderTest> formats_that_read() {
  std::vector<FormatUnderTest> all = formats_that_write();
  all.push_back({.name = "torch_zip_of_torch",
                 .format = formats::Format::torch_zip,
                 .destination = "checkpoint.pt",
                 .open = formats::open_torch_zip,
                 .fixture = fixture("torch_zip/valid/shared.pt")});
  return all;
}

MemoryCheckpoint fit_to_format(const MemoryCheckpoint& source, const FormatUnderTest& format) {
  MemoryCheckpoint fitted(source.path(), source.contents().world_size);
  for (std::size_t i = 0; i < source.contents().tensors.size(); ++i) {
    const TensorEntry& tensor = source.contents().tensors[i];
    if (!format.holds(tensor.meta.dtype)) continue;
    std::vector<Piece> pieces;
    for (const Piece& piece : tensor.pieces) {
      if (format.pieces == FormatUnderTest::Pieces::whole) break;
      if (format.pieces == FormatUnderTest::Pieces::rows) {
        pieces = rows_of(tensor.meta.shape, source.contents().world_size);
        break;
      }
      if (format.pieces == FormatUnderTest::Pieces::any) {
        pieces.push_back(piece);
        continue;
      }
      // `pieces` gets each box once; formats of boxes may leave out replicas and empty pieces.
      for (Box& box : boxes_of(piece.region, tensor.meta.shape)) {
        const bool is_replica = std::ranges::any_of(
            pieces, [&](const Piece& other) { return std::get<Box>(other.region) == box; });
        if (!is_replica) pieces.push_back({std::move(box), piece.rank});
      }
    }
    const bool may_be_empty = format.pieces == FormatUnderTest::Pieces::any ||
                              format.pieces == FormatUnderTest::Pieces::rows;
    if (tensor.meta.numel() == 0 && !may_be_empty) pieces.clear();
    TensorEntry& entry = fitted.add(tensor.meta, whole_tensor(source, i), std::move(pieces));
    entry.key_path = tensor.key_path;
    if (format.state_kinds == FormatUnderTest::Extras::kept) {
      entry.kind = tensor.kind;
      entry.parameter = tensor.parameter;
    }
  }
  CheckpointContents& contents = fitted.contents_for_change();
  for (std::size_t i = 0; i < source.contents().values.size(); ++i) {
    fitted.add_value(source.contents().values[i].name, source.read_value(i));
  }
  contents.values = source.contents().values;
  if (format.aliases == FormatUnderTest::Extras::kept) contents.aliases = source.contents().aliases;
  if (format.state_kinds == FormatUnderTest::Extras::kept) {
    contents.units = source.contents().units;
    contents.annotations = source.contents().annotations;
  }
  return fitted;
}

MemoryCheckpoint as_it_comes_back(const MemoryCheckpoint& source, const FormatUnderTest& format) {
  const MemoryCheckpoint fitted = fit_to_format(source, format);
  if (format.values == FormatUnderTest::Nesting::kept) return fitted;
  MemoryCheckpoint back(fitted.path(), fitted.contents().world_size);
  for (std::size_t i = 0; i < fitted.contents().tensors.size(); ++i) {
    const TensorEntry& tensor = fitted.contents().tensors[i];
    back.add(tensor.meta, whole_tensor(fitted, i)).key_path = tensor.key_path;
  }
  for (std::size_t i = 0; i < fitted.contents().values.size(); ++i) {
    const formats::ValueEntry& value = fitted.contents().values[i];
    add_opened(back, value.key_path.empty() ? KeyPath{value.name} : KeyPath(value.key_path),
               fitted.read_value(i));
  }
  back.contents_for_change().aliases = fitted.contents().aliases;
  return back;
}

void write_checkpoint(const FormatUnderTest& format, FileSystem& fs, const std::string& path,
                      const MemoryCheckpoint& source, int num_threads, OverwritePolicy overwrite) {
  const MemoryCheckpoint fitted = fit_to_format(source, format);
  std::vector<Value> values;
  for (std::size_t i = 0; i < fitted.contents().values.size(); ++i) {
    values.push_back(fitted.read_value(i));
  }
  const auto writer = format.create(fs, path, fitted.contents(), std::move(values), overwrite);
  copy_checkpoint(fitted, *writer, num_threads);
}

namespace {

/// Returns a key path as text: `['model'][0]`.
std::string shown(const std::string& name, const KeyPath& key_path) {
  // An empty key path means one key: the whole name.
  if (key_path.empty()) return "['" + name + "']";
  std::string text;
  for (const auto& key : key_path) {
    const std::string spelled = formats::spell({key});
    text += std::holds_alternative<std::string>(key)    ? "['" + spelled + "']"
            : std::holds_alternative<std::int64_t>(key) ? "[" + spelled + "]"
                                                        : "{" + spelled + "}";
  }
  return text;
}

std::map<std::string, std::string> shown_aliases(const CheckpointContents& contents) {
  std::map<std::string, std::string> shown_by_name;
  for (const Alias& alias : contents.aliases) {
    shown_by_name[alias.fqn] = alias.target + " " + shown(alias.fqn, alias.key_path);
  }
  return shown_by_name;
}

}  // namespace

void expect_equal_checkpoints(const CheckpointReader& found, const CheckpointReader& expected) {
  const CheckpointContents& a = found.contents();
  const CheckpointContents& b = expected.contents();
  ASSERT_EQ(a.tensors.size(), b.tensors.size());
  for (std::size_t i = 0; i < a.tensors.size(); ++i) {
    SCOPED_TRACE(printable(b.tensors[i].meta.fqn));
    const TensorEntry& tensor = a.tensors[i];
    ASSERT_EQ(tensor.meta, b.tensors[i].meta);
    EXPECT_EQ(tensor.kind, b.tensors[i].kind);
    EXPECT_EQ(tensor.parameter, b.tensors[i].parameter);
    EXPECT_EQ(shown(tensor.meta.fqn, tensor.key_path),
              shown(tensor.meta.fqn, b.tensors[i].key_path));
    std::vector<Region> regions;
    for (const Piece& piece : tensor.pieces) {
      regions.push_back(piece.region);
      EXPECT_EQ(region_error(piece.region, tensor.meta.shape), std::nullopt);
      EXPECT_GE(piece.rank, 0);
      EXPECT_LT(piece.rank, a.world_size);
    }
    EXPECT_TRUE(check_coverage(regions, tensor.meta.shape).empty());
    EXPECT_EQ(whole_tensor(found, i), whole_tensor(expected, i));
  }
  ASSERT_EQ(a.values.size(), b.values.size());
  for (std::size_t i = 0; i < a.values.size(); ++i) {
    EXPECT_EQ(a.values[i].name, b.values[i].name);
    EXPECT_EQ(shown(a.values[i].name, a.values[i].key_path),
              shown(b.values[i].name, b.values[i].key_path));
    // The JSON also shows differences that == does not: -0.0, and the bits of a NaN.
    EXPECT_EQ(value_to_json(found.read_value(i)), value_to_json(expected.read_value(i)));
    EXPECT_EQ(found.read_value(i), expected.read_value(i))
        << value_to_string(found.read_value(i)) << " is not "
        << value_to_string(expected.read_value(i));
  }
  EXPECT_EQ(shown_aliases(a), shown_aliases(b));
  EXPECT_EQ(a.units, b.units);
  for (const auto& [key, text] : b.annotations) {
    const auto annotation = a.annotations.find(key);
    ASSERT_NE(annotation, a.annotations.end()) << key;
    EXPECT_EQ(annotation->second, text);
  }
}

Bytes patterned_bytes(std::uint64_t nbytes, std::uint64_t seed) {
  Bytes bytes(nbytes);
  std::uint64_t state = seed * 2 + 1;
  for (std::byte& byte : bytes) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    byte = std::byte(state >> 56);
  }
  return bytes;
}

MemoryCheckpoint one_of_everything() {
  MemoryCheckpoint source("one_of_everything", 4);
  const auto add = [&](TensorMeta meta, std::vector<Piece> pieces = {}) -> TensorEntry& {
    const Bytes bytes = patterned_bytes(meta.nbytes(), meta.fqn.size());
    return source.add(std::move(meta), bytes, std::move(pieces));
  };
  // Five rows on four ranks: two, two, one, none.
  const auto rows = [](std::int64_t begin, std::int64_t end, int rank) {
    return Piece{Box{{begin, 0}, {end - begin, 3}}, rank};
  };
  add({"model.layers.0.weight", DType::bfloat16, {5, 3}},
      {rows(0, 2, 0), rows(2, 4, 1), rows(4, 5, 2), rows(5, 5, 3)})
      .key_path = {"model", "layers.0.weight"};
  add({"model.flat", DType::float32, {4, 5}},
      {{FlatRange{0, 7}, 0}, {FlatRange{7, 14}, 1}, {FlatRange{14, 20}, 2}, {FlatRange{0, 0}, 3}});
  add({"model.replica", DType::float16, {3}}, {{Box{{0}, {3}}, 0}, {Box{{0}, {3}}, 2}});
  add({"model.empty", DType::int64, {0, 7}});
  add({"model.grid", DType::uint8, {4, 4}}, {{Box{{0, 0}, {2, 3}}, 0},
                                             {Box{{0, 3}, {2, 1}}, 1},
                                             {Box{{2, 0}, {2, 3}}, 2},
                                             {Box{{2, 3}, {2, 1}}, 3}});
  TensorEntry& moment = add({"optim.state.0.exp_avg", DType::float32, {5, 3}},
                            {rows(0, 2, 0), rows(2, 4, 1), rows(4, 5, 2)});
  moment.kind = StateKind::pointwise;
  moment.parameter = "model.layers.0.weight";
  moment.key_path = {"optim", "state", 0, "exp_avg"};
  TensorEntry& step = add({"optim.state.0.step", DType::float32, {}});
  step.kind = StateKind::scalar_parameter;
  step.parameter = "model.layers.0.weight";
  step.key_path = {"optim", "state", 0, "step"};

  source.add_value("epoch", 3);
  source.add_value("optim.param_groups.0.betas", Value::Tuple{{0.9, 0.999}});
  for (formats::ValueEntry& value : source.contents_for_change().values) {
    if (value.name != "epoch") value.key_path = {"optim", "param_groups", 0, "betas"};
  }
  source.add_alias("model.tied", "model.layers.0.weight");
  source.contents_for_change().annotations = {{"note", "naïve \"模型\"\n"}};
  source.contents_for_change().units = {
      make_flat_unit("model", DType::bfloat16, {{"model.layers.0.weight", {5, 3}}})};
  return source;
}

std::vector<Value> values_of_every_kind() {
  const std::int64_t min = std::numeric_limits<std::int64_t>::min();
  std::vector<Value> values{
      Value{},
      true,
      false,
      0,
      -1,
      min,
      std::numeric_limits<std::int64_t>::max(),
      Value::BigInt{"9223372036854775808"},
      Value::BigInt{"-" + std::string(400, '7')},
      0.0,
      -0.0,
      1.0,
      0.1,
      5e-324,
      1.7976931348623157e308,
      std::nan(""),
      -std::nan(""),
      std::nan("291"),
      HUGE_VAL,
      -HUGE_VAL,
      "",
      "naïve 模型 🚀 \"quoted\" \\ \n\t\x01",
      std::string("nul\0inside", 10),
      std::string(100'000, 'x'),
      Value::Bytes{""},
      Value::Bytes{std::string("\x00\xff\x80", 3)},
      Value::Symbol{"torch.bfloat16"},
      Value::Symbol{"complex:-0.0,nan:7ff8000000000005"},
      Value::List{},
      Value::List{1, 1.0, true, "1", Value{}},
      Value::Tuple{},
      Value::Tuple{{0.9, 0.999}},
      Value::Set{{1, "a"}},
      Value::Dict{},
      Value::Dict{{"b", 1}, {"a", 2}, {3, "int key"}, {"$tuple", Value::List{}}},
      Value::Dict{{Value::Tuple{{1, 2}}, "tuple key"}, {false, Value{}}},
  };
  Value deep = "bottom";
  for (int depth = 0; depth < 20; ++depth) {
    deep = Value::List{Value::Dict{{"k", std::move(deep)}}};
  }
  values.push_back(std::move(deep));
  return values;
}

}  // namespace tessera::test
