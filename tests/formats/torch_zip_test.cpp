#include "formats/torch_zip.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "base/json.h"
#include "formats/pickle/plain_value.h"
#include "formats/torch_zip/tensor_parser.h"
#include "formats/torch_zip/torch_archive.h"
#include "formats/torch_zip/torch_stream.h"
#include "formats/torch_zip/torch_zip_reader.h"
#include "support/error_matchers.h"
#include "support/expectation.h"
#include "support/fixtures.h"
#include "support/memory_checkpoint.h"
#include "support/memory_file.h"
#include "support/reading.h"
#include "support/temporary_directory.h"
#include "support/zip_bytes.h"
#include "tessera/base/parallel.h"
#include "tessera/formats/detect.h"

// Shows E2, E3, E9, E14. Reading torch.save, aliases, nesting; nothing from a file is executed.
namespace tessera::formats {
namespace {

using std::string_literals::operator""s;
using test::Bytes;
using test::expect_holds;
using test::MemoryFile;
using test::read_everything;
using test::ThrowsError;
using testing::AllOf;
using testing::AnyOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Pair;
using torch_zip::Leaf;
using torch_zip::TensorRecord;
using torch_zip::TorchArchive;
using torch_zip::TorchStream;

const std::string kTorchZip = test::fixture("torch_zip/");

std::unique_ptr<CheckpointReader> open_file(const std::string& path) {
  return open_torch_zip(FileSystem::posix(), path);
}

std::string content_of(const std::string& path) {
  return read_file(FileSystem::posix(), path, std::uint64_t{1} << 24);
}

// Pickles, written by hand.

std::string number(std::int64_t value) {
  std::string bytes = "\x8a\x08";
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>(value >> (8 * i));
  return bytes;
}
std::string text(const std::string& value) {
  std::string bytes = "X";
  for (int i = 0; i < 4; ++i) bytes += static_cast<char>(value.size() >> (8 * i));
  return bytes + value;
}
std::string tuple(const std::vector<std::string>& items) {
  return "(" + std::accumulate(items.begin(), items.end(), std::string()) + "t";
}
std::string list(const std::vector<std::string>& items) {
  return "](" + std::accumulate(items.begin(), items.end(), std::string()) + "e";
}
std::string dict(const std::vector<std::pair<std::string, std::string>>& entries) {
  std::string pickle = "}(";
  for (const auto& [key, value] : entries) pickle += key + value;
  return pickle + "u";
}
std::string numbers(const Shape& values) {
  std::vector<std::string> items;
  for (const std::int64_t value : values) items.push_back(number(value));
  return tuple(items);
}
std::string tensor(const std::string& storage_type, std::int64_t numel, std::int64_t offset,
                   const Shape& shape, const Shape& strides) {
  const std::string storage = tuple({text("storage"), "ctorch\n" + storage_type + "\n", text("0"),
                                     text("cpu"), number(numel)}) +
                              "Q";
  return "ctorch._utils\n_rebuild_tensor_v2\n" +
         tuple({storage, number(offset), numbers(shape), numbers(strides), "\x89",
                "ccollections\nOrderedDict\n)R"}) +
         "R";
}
const std::string kTensor = tensor("FloatStorage", 2, 0, {2}, {1});

/// An archive whose object is `pickle` and whose storage 0 is `storage`.
std::string archive(const std::string& pickle, const std::string& storage) {
  return test::zip_bytes({{.name = "x/data.pkl", .data = "\x80\x02" + pickle + "."},
                          {.name = "x/byteorder", .data = "little"},
                          {.name = "x/data/0", .data = storage},
                          {.name = "x/version", .data = "3\n"}});
}

std::string little_endian(std::uint64_t value) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>(value >> (8 * i));
  return bytes;
}

/// A stream, as before PyTorch 1.6, whose object is `pickle` and whose storage 0 has two float32.
std::string stream(const std::string& pickle, bool is_little_endian = true) {
  const auto whole = [](const std::string& part) { return "\x80\x02" + part + "."; };
  const std::string machine = dict({{text("little_endian"), is_little_endian ? "\x88" : "\x89"}});
  return whole("\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19") + whole(number(1001)) +
         whole(machine) + whole(pickle) + whole(list({text("0")})) + little_endian(2) +
         std::string(4, '\1') + std::string(4, '\2');
}

/// Returns the names and values of an object. A tensor is shown as `tensor`, a refused value as
/// the reason in brackets.
std::string leaves_of(const std::string& pickle, const std::vector<std::string>& as_dict = {}) {
  const MemoryFile file(archive(pickle, std::string(8, '\0')));
  std::string shown;
  for (const Leaf& leaf : TorchArchive(file, {0, file.nbytes()}, as_dict).leaves()) {
    shown += (shown.empty() ? "" : " ") + spell(leaf.path) + "=";
    if (const auto* value = std::get_if<Value>(&leaf.content)) {
      shown += value_to_json(*value);
    } else if (const auto* refusal = std::get_if<Error>(&leaf.content)) {
      EXPECT_EQ(refusal->kind(), ErrorKind::unsupported);
      shown += "<" + std::string(refusal->reason()) + ">";
    } else {
      shown += "tensor";
    }
  }
  return shown;
}

TEST(TorchZipTest, ReadsWhatTorchSaved) {
  int num_files = 0;
  for (const std::string& name : FileSystem::posix().list_directory(kTorchZip + "valid")) {
    if (!name.ends_with(".pt")) continue;
    SCOPED_TRACE(name);
    const std::string path = kTorchZip + "valid/" + name;
    expect_holds(*open_file(path), path + ".expect.json");
    ++num_files;
  }
  EXPECT_GE(num_files, 16);
}

TEST(TorchZipTest, SaysThatBytesAreBigEndian) {
  const auto encoding_in = [](const std::string& name) {
    return open_file(kTorchZip + "valid/" + name)->piece_storage(0, 0).encoding;
  };
  EXPECT_EQ(encoding_in("big_endian.pt"), "big-endian");
  EXPECT_EQ(encoding_in("dtypes.pt"), "plain");
}

TEST(TorchZipTest, ReadsWhatIsBesideObjectsOfClasses) {
  int num_files = 0;
  for (const std::string& name : FileSystem::posix().list_directory(kTorchZip + "classes")) {
    if (name.ends_with(".json")) continue;
    SCOPED_TRACE(name);
    const std::string path = kTorchZip + "classes/" + name;
    expect_holds(*open_file(path), path + ".expect.json");
    ++num_files;
  }
  EXPECT_GE(num_files, 9);
}

TEST(TorchZipTest, OnePartOfACheckpointSaysSo) {
  const std::pair<std::string, std::string> parts[] = {
      {"zero_pp_rank_0_mp_rank_00_optim_states.pt",
       "one rank of several: DeepSpeed ZeRO stage 2, optimizer state of one of 2 data-parallel "
       "ranks"},
      {"mp_rank_00_model_states.pt", "one rank of 2: DeepSpeed ZeRO stage 2, model states"},
      {"model_world_size_2_rank_1.pt",
       "one rank of 2: FSDP or tensor parallelism, the local parts of 1 tensor"},
      {"optim_world_size_2_rank_1.pt", "one rank of 2: FSDP, as the name of the file says"},
      {"mp_rank_01_003/model_optim_rng.pt",
       "one rank of 8: Megatron-LM, one rank of tensor, pipeline and expert parallelism"},
      {"mp_rank_00_003/model_optim_rng.pt",
       "one rank of 4: Megatron-LM, one rank of tensor, pipeline and expert parallelism"}};
  for (const auto& [name, words] : parts) {
    SCOPED_TRACE(name);
    const std::string path = kTorchZip + "parts/" + name;
    const auto reader = open_file(path);
    expect_holds(*reader, path + ".expect.json");
    ASSERT_TRUE(reader->contents().part);
    EXPECT_EQ(part_in_words(*reader->contents().part), words);
  }
}

TEST(TorchZipTest, AFileOfOneLayerOrExpertOrOptimizerIsAPart) {
  const auto part_of = [](const std::string& path) {
    const auto part = open_file(path)->contents().part;
    return part ? part_in_words(*part) : "";
  };
  EXPECT_EQ(part_of(test::fixture("megatron/valid/dp2_distributed/iter_0000003/mp_rank_00/"
                                  "distrib_optim.pt")),
            "one file of several: Megatron-LM's distributed optimizer, without its model");
  const std::string layer = "layer_03-model_01-model_states.pt";
  const std::string fixture = test::fixture("deepspeed/valid/tensor/global_step2/" + layer);
  const test::TemporaryDirectory directory;
  for (const auto& [name, form] : std::vector<std::pair<std::string, std::string>>{
           {"layer_03-model_states.pt", "one layer of a pipeline"},
           {layer, "one model-parallel rank's part of one layer"},
           {"layer_0_expert_1_mp_rank_00_model_states.pt", "one expert of one layer"},
           {"expert_1_mp_rank_00_model_states.pt", "one expert of all layers"},
           {"expp_rank_1_mp_rank_00_optim_states.pt",
            "optimizer state of one expert-parallel rank"}}) {
    std::filesystem::copy_file(fixture, directory / name);
    EXPECT_EQ(part_of(directory / name),
              "one file of several: DeepSpeed, " + form + ", as the name of the file says");
    std::filesystem::remove(directory / name);
  }
}

TEST(TorchZipTest, WholeCheckpointsAreNoParts) {
  for (const std::string folder : {"valid/", "classes/"}) {
    for (const std::string& name : FileSystem::posix().list_directory(kTorchZip + folder)) {
      if (name.ends_with(".json")) continue;
      EXPECT_FALSE(open_file(kTorchZip + folder + name)->contents().part) << name;
    }
  }
}

TEST(TorchZipTest, RecordsThatNothingIsReadFromAreNamed) {
  const std::string pickle = "\x80\x02" + dict({{text("w"), kTensor}}) + ".";
  std::vector<test::ZipMember> members{{.name = "x/data.pkl", .data = pickle},
                                       {.name = "x/byteorder", .data = "little"},
                                       {.name = "x/data/", .data = ""},
                                       {.name = "x/data/0", .data = std::string(8, '\0')},
                                       {.name = "x/.data/serialization_id", .data = "1"},
                                       {.name = "x/version", .data = "3\n"}};
  const auto findings_of = [&] {
    const auto reader =
        torch_zip::read_torch_zip(std::make_unique<MemoryFile>(test::zip_bytes(members)), {});
    return reader->contents().opening_findings;
  };
  EXPECT_TRUE(findings_of().empty());
  members.push_back({.name = "x/data/1", .data = "mine"});
  members.push_back({.name = "notes", .data = "mine"});
  ASSERT_EQ(findings_of().size(), 1u);
  EXPECT_EQ(findings_of()[0].severity, Finding::Severity::note);
  EXPECT_EQ(findings_of()[0].found,
            "2 other records, which a move leaves out: 'x/data/1', 'notes'");
  for (const char letter : {'a', 'b', 'c', 'd'}) {
    members.push_back({.name = "x/extra/"s + letter, .data = "mine"});
  }
  EXPECT_EQ(findings_of()[0].found,
            "6 other records, which a move leaves out: 'x/data/1', 'notes', 'x/extra/a', "
            "'x/extra/b', 'x/extra/c' and 1 more");
}

TEST(TorchZipTest, AReaderOfManyFilesHasNoPiecesAndDropsKeyPaths) {
  const std::string nested = dict({{text("layer"), dict({{text("w"), kTensor}})}});
  const std::string stored("\0\0\x80\x3f\0\0\0\x40", 8);  // 1.0, 2.0
  const auto reader = torch_zip::read_torch_zip(
      std::make_unique<MemoryFile>(archive(nested, stored)), {}, torch_zip::Pieces::left_out);
  ASSERT_EQ(reader->contents().tensors.size(), 1u);
  const TensorEntry& tensor = reader->contents().tensors[0];
  EXPECT_THAT(tensor.pieces, testing::IsEmpty());
  EXPECT_EQ(tensor.key_path, (KeyPath{"layer", "w"}));
  reader->drop_key_paths();
  EXPECT_EQ(tensor.key_path, KeyPath());
  EXPECT_EQ(tensor.meta.fqn, "layer.w");
  std::vector<std::byte> bytes(stored.size());
  reader->read_piece(0, 0, {0, tensor.meta.numel()}, bytes);
  EXPECT_EQ(std::memcmp(bytes.data(), stored.data(), stored.size()), 0);
}

TEST(TorchZipTest, EqualPlacesOfPartsShareMemory) {
  torch_zip::ShardPlace place;
  place.whole_shape = {4, 2};
  place.region = {{0, 0}, {2, 2}};
  place.mesh = {2};
  place.coordinates = {0};
  torch_zip::ShardPlace of_other_rank = place;
  of_other_rank.coordinates = {1};
  torch_zip::PlacePool pool;
  const torch_zip::SharedPlace first = pool.share(place);
  EXPECT_EQ(*first, place);
  EXPECT_EQ(pool.share(place), first);
  EXPECT_EQ(*pool.share(of_other_rank), of_other_rank);  // has the hash of `place`
  EXPECT_EQ(*first, place);
}

std::vector<Simplification> simplifications_of(const std::string& pickle) {
  const auto reader = torch_zip::read_torch_zip(
      std::make_unique<MemoryFile>(archive(pickle, std::string(8, '\0'))), {});
  return reader->contents().simplifications;
}

TEST(TorchZipTest, AttributesThatAreDroppedAreNoted) {
  using Kind = Simplification::Kind;
  const std::string state = dict({{text("note"), number(1)}});
  const std::string storage =
      tuple({text("storage"), "ctorch\nFloatStorage\n", text("0"), text("cpu"), number(2)}) + "Q";
  const std::string arguments =
      tuple({storage, number(0), numbers({2}), numbers({1}), "\x89", "N"});
  const std::string of_type =
      "ctorch._tensor\n_rebuild_from_type_v2\n" +
      tuple({"ctorch._utils\n_rebuild_tensor_v2\n", "ctorch\nTensor\n", arguments,
             tuple({state, dict({{text("slot"), number(1)}})})}) +
      "R";
  const std::string parameter =
      "ctorch._utils\n_rebuild_parameter_with_state\n" + tuple({kTensor, "\x88", "N", state}) + "R";
  const std::string ordered = "ccollections\nOrderedDict\n)R(" + text("w") + kTensor + "u" +
                              dict({{text("_metadata"), number(1)}}) + "b";
  EXPECT_THAT(simplifications_of(dict({{text("a"), of_type}})),
              ElementsAre(Simplification{Kind::attributes, "a", {"note", "slot"}}));
  EXPECT_THAT(simplifications_of(dict({{text("a"), parameter}})),
              ElementsAre(Simplification{Kind::parameter, "a", {}},
                          Simplification{Kind::attributes, "a", {"note"}}));
  EXPECT_THAT(simplifications_of(dict({{text("a"), ordered}})),
              ElementsAre(Simplification{Kind::dict_class, "a", {}},
                          Simplification{Kind::attributes, "a", {"_metadata"}}));
  const std::string in_value = "ccollections\nOrderedDict\n)R" + state + "b";
  EXPECT_THAT(simplifications_of(dict({{text("a"), tuple({in_value, number(3), in_value})}})),
              ElementsAre(Simplification{Kind::value_type, "a", {"OrderedDict"}},
                          Simplification{Kind::attributes, "a", {"note"}}));
}

TEST(TorchZipTest, TensorsThatAModuleHasBesideItsParametersAreNoted) {
  using Kind = Simplification::Kind;
  const auto module = [](const std::string& modules) {
    return "cmine\nM\n)\x81" +
           dict({{text("_parameters"), dict({{text("w"), kTensor}})},
                 {text("_buffers"), dict({})},
                 {text("_modules"), modules},
                 {text("qweight"), kTensor},
                 {text("scales"), list({kTensor})},
                 {text("bits"), number(4)}}) +
           "b";
  };
  const std::string whole = module(dict({{text("in"), module(dict({}))}}));
  EXPECT_THAT(simplifications_of(dict({{text("m"), whole}})),
              ElementsAre(Simplification{Kind::attributes, "m.in", {"qweight", "scales"}},
                          Simplification{Kind::attributes, "m", {"qweight", "scales"}}));
}

TEST(TorchZipTest, ModulesThatReferToTheirModelAreAllSearchedForTensors) {
  std::vector<std::pair<std::string, std::string>> layers;
  constexpr std::size_t kNumLayers = 1500;
  for (std::size_t i = 0; i < kNumLayers; ++i) {
    const std::string parts = dict({{text("_parameters"), dict({{text("w"), kTensor}})},
                                    {text("_buffers"), "}"},
                                    {text("_modules"), "}"},
                                    {text(i + 1 < kNumLayers ? "model" : "last"), list({"h\1"})}});
    layers.emplace_back(text(std::to_string(i)), "cmine\nM\n)\x81" + parts + "b");
  }
  const std::string model =
      "cmine\nM\n)\x81q\1" +
      dict(
          {{text("_parameters"), "}"}, {text("_buffers"), "}"}, {text("_modules"), dict(layers)}}) +
      "b";
  const auto found = simplifications_of(dict({{text("m"), model}}));
  ASSERT_EQ(found.size(), kNumLayers);
  EXPECT_EQ(found.back().what, std::vector<std::string>{"last"});
}

TEST(TorchZipTest, ARefusedValueSaysThatItHoldsTensors) {
  const std::string object = "ca\nB\n)\x81" + dict({{text("w"), kTensor}}) + "b";
  const MemoryFile file(archive(list({object}), std::string(8, '\0')));
  const TorchArchive saved(file, {0, file.nbytes()});
  EXPECT_THAT([&] { saved.as_value(); },
              ThrowsError(ErrorKind::unsupported,
                          "object of class a.B; nothing was executed; holds 1 tensor"));
}

TEST(TorchZipTest, TypesThatBecomePlainerAreNoted) {
  const auto types_in = [](const std::string& value) {
    std::vector<std::string> types;
    for (const Simplification& simplified : simplifications_of(dict({{text("a"), value}}))) {
      EXPECT_EQ(simplified.kind, Simplification::Kind::value_type);
      EXPECT_EQ(simplified.name, "a");
      types.insert(types.end(), simplified.what.begin(), simplified.what.end());
    }
    return types;
  };
  const std::string size = "ctorch\nSize\n" + tuple({numbers({2})}) + "R";
  const std::string frozen = "cbuiltins\nfrozenset\n" + tuple({list({number(1)})}) + "R";
  const std::string by_opcode = "(" + number(1) + "\x91";
  const std::string byte_array = "\x96\x01\0\0\0\0\0\0\0z"s;
  EXPECT_THAT(types_in(tuple({size, frozen, size})), ElementsAre("frozenset", "torch.Size"));
  EXPECT_THAT(types_in(by_opcode), ElementsAre("frozenset"));
  EXPECT_THAT(types_in(byte_array), ElementsAre("bytearray"));
  EXPECT_THAT(types_in(dict({{frozen, number(1)}})), ElementsAre("frozenset"));
  EXPECT_THAT(types_in("\x8f(" + number(1) + "\x90"), ElementsAre());
  EXPECT_THAT(types_in("\x8f(" + frozen + by_opcode + "\x90"), ElementsAre());  // comes back as one
}

std::unique_ptr<CheckpointReader> open_as_dicts(const std::string& name,
                                                const std::vector<std::string>& classes) {
  return open_torch_zip_with_classes(FileSystem::posix(), kTorchZip + "classes/" + name, classes);
}

TEST(TorchZipTest, ObjectsOfNamedClassesAreDicts) {
  const auto reader = open_as_dicts("megatron.pt", {"argparse.Namespace"});
  const CheckpointContents& contents = reader->contents();
  EXPECT_THAT(contents.opened_classes,
              ElementsAre(OpenedClass{"argparse.Namespace", OpenedClass::As::dict, 2}));
  ASSERT_NE(contents.find_tensor("args.scale"), nullptr);
  EXPECT_EQ(contents.find_tensor("args.scale")->key_path, (KeyPath{"args"s, "scale"s}));
  std::map<std::string, std::string> args;
  for (std::size_t i = 0; i < contents.values.size(); ++i) {
    const std::string& name = contents.values[i].name;
    if (!name.starts_with("args.")) continue;
    try {
      args[name] = value_to_json(reader->read_value(i));
    } catch (const Error& error) {
      args[name] = error.reason();
    }
  }
  EXPECT_THAT(args, ElementsAre(Pair("args.betas", R"({"$tuple":[0.9,0.95]})"),
                                Pair("args.data_path", R"(["a","b"])"), Pair("args.lr", "0.0003"),
                                Pair("args.model_type", HasSubstr("ModelType")),
                                Pair("args.nested.depth", "2"),
                                Pair("args.params_dtype", R"({"$symbol":"torch.bfloat16"})")));
  EXPECT_THAT(
      [&] {
        require_classes_found({"argparse.Namespace", "a.B"}, {&contents}, "--as-dict");
      },
      ThrowsError(ErrorKind::invalid_argument, "'a.B'"));
}

TEST(TorchZipTest, NamedClassesMayBeDerivedFromDictOrReferBack) {
  const auto reader =
      open_as_dicts("derived.pt", {"trainer.config.Config", "trainer.config.Attributes"});
  const CheckpointContents& contents = reader->contents();
  EXPECT_NE(contents.find_tensor("owner.weight"), nullptr);
  std::map<std::string, std::string> refused;
  for (std::size_t i = 0; i < contents.values.size(); ++i) {
    try {
      reader->read_value(i);
    } catch (const Error& error) {
      refused[contents.values[i].name] = error.reason();
    }
  }
  EXPECT_THAT(refused, ElementsAre(Pair("both", HasSubstr("whose state is no dict")),
                                   Pair("owner.child.parent", HasSubstr("a reference back"))));
  EXPECT_THAT(contents.opened_classes,
              ElementsAre(OpenedClass{"trainer.config.Attributes", OpenedClass::As::dict, 1},
                          OpenedClass{"trainer.config.Config", OpenedClass::As::dict, 2}));
}

TEST(TorchZipTest, WholeModulesGiveTheirParametersAndBuffers) {
  const auto reader = open_file(kTorchZip + "classes/whole_module.pt");
  EXPECT_THAT(reader->contents().opened_classes,
              ElementsAre(OpenedClass{"torch.nn.modules.container.Sequential",
                                      OpenedClass::As::module, 1}));
  ASSERT_EQ(reader->contents().aliases.size(), 1u);  // the tied weight
  // One key, as in the module's state_dict().
  ASSERT_NE(reader->contents().find_tensor("norm.weight"), nullptr);
  EXPECT_TRUE(reader->contents().find_tensor("norm.weight")->key_path.empty());
  EXPECT_EQ(open_file(kTorchZip + "classes/modules.pt")->contents().opened_classes.size(), 2u);
}

TEST(TorchZipTest, OnlyWhatIsForeignIsRefused) {
  const std::string foreign = "cos\nsystem\n" + tuple({text("id")}) + "R";
  const std::string why = "=<pickle: call of os.system; nothing was executed>";
  const std::string object = "ca\nB\n)\x81";
  const std::pair<std::string, std::string> cases[] = {
      {foreign, why},
      {dict({{text("a"), foreign}, {text("b"), number(1)}}), "a" + why + " b=1"},
      {dict({{text("a"), dict({{text("b"), foreign}, {text("c"), kTensor}})}}),
       "a.b" + why + " a.c=tensor"},
      {list({kTensor, foreign}), "0=tensor 1" + why},
      {dict({{text("a"), list({number(1), foreign})}}), "a" + why},
      {dict({{text("a"), tuple({kTensor, foreign})}}), "a.0=tensor a.1" + why},
      // within an object of a class nothing is a tensor of the checkpoint
      {object + dict({{text("w"), kTensor}, {text("v"), list({kTensor})}}) + "b",
       "=<pickle: object of class a.B; nothing was executed; holds 2 tensors>"},
      // keys
      {dict({{text("a"), dict({{object, kTensor}, {text("b"), number(1)}})}}),
       "a=<pickle: dict with the key a.B(...); nothing was executed; holds 1 tensor>"},
      {dict({{text("a"), dict({{kTensor, number(1)}})}}),
       "a=<pickle: dict with the key torch._utils._rebuild_tensor_v2(...); nothing was executed; "
       "holds 1 tensor>"},
      // a defaultdict's factory and an OrderedDict's attributes may be of any class
      {"ccollections\ndefaultdict\nca\nf\n\x85R" + text("k") + number(1) + "s", "k=1"},
      {"ccollections\nOrderedDict\n)R" + text("k") + number(1) + "s}" + text("m") + foreign + "sb",
       "k=1"},
  };
  for (const auto& [pickle, leaves] : cases) {
    SCOPED_TRACE(leaves);
    EXPECT_EQ(leaves_of(pickle), leaves);
  }
}

TEST(TorchZipTest, ObjectsThatContainThemselvesAreRefusedAlone) {
  const std::string me = "ca\nB\n)\x81q\1";
  const std::string cycle = me + "}" + text("x") + "h\1sb";
  EXPECT_THAT(leaves_of(dict({{text("a"), cycle}, {text("b"), kTensor}})),
              testing::EndsWith("nothing was executed> b=tensor"));
  EXPECT_THAT(leaves_of(dict({{text("a"), cycle}, {text("b"), kTensor}}), {"a.B"}),
              AllOf(HasSubstr("a.x=<"), HasSubstr("a reference back"), HasSubstr("b=tensor")));
  const std::string in_tuple = me + "}" + text("x") + tuple({"h\1", kTensor}) + "sb";
  EXPECT_THAT(leaves_of(in_tuple, {"a.B"}), HasSubstr("x.1=tensor"));
  const std::string module =
      me +
      dict({{text("_parameters"), dict({{text("w"), kTensor}, {text("none"), "N"}})},
            {text("_buffers"), "}"},
            {text("_modules"), dict({{text("me"), "h\1"}})}}) +
      "b";
  EXPECT_THAT(leaves_of(dict({{text("m"), module}})),
              AllOf(HasSubstr("m.w=tensor m.me=<"), HasSubstr("a reference back")));
}

TEST(TorchZipTest, WhatOnlyLooksLikeAModuleIsAnObject) {
  const auto module = [](const std::string& parameters) {
    return "ca\nB\n)\x81" +
           dict({{text("_parameters"), parameters},
                 {text("_buffers"), "}"},
                 {text("_modules"), "}"}}) +
           "b";
  };
  EXPECT_EQ(leaves_of(dict({{text("m"), module("}")}})), "m={}");
  EXPECT_EQ(leaves_of(module(dict({{text("w"), kTensor}}))), "w=tensor");
  EXPECT_THAT(leaves_of(dict({{text("m"), module(list({kTensor}))}})), HasSubstr("m=<"));
  EXPECT_THAT(leaves_of("ctorch.nn.modules.linear\nLinear\n)\x81"), HasSubstr("state_dict()"));
}

TEST(TorchZipTest, AQuantizedModuleIsRefusedByName) {
  const auto module = [](const std::string& class_name, const std::string& attribute,
                         const std::string& value) {
    return "c" + class_name + "\n)\x81" +
           dict({{text("_parameters"), "}"},
                 {text("_buffers"), "}"},
                 {text("_modules"), "}"},
                 {text(attribute), value}}) +
           "b";
  };
  const std::string packed = "ctorch\nScriptObject\n)\x81";
  const std::string quantized = "torch.ao.nn.quantized.dynamic.modules.linear\nLinear";
  for (const std::string& refused :
       {module("mine\nPacked", "_packed_params", packed), module(quantized, "param", packed),
        module(quantized, "scale", number(1))}) {
    EXPECT_THAT(leaves_of(dict({{text("m"), refused}})),
                AllOf(HasSubstr("m=<"), HasSubstr("quantized")));
  }
  EXPECT_EQ(leaves_of(dict({{text("m"), module("mine\nScaled", "scale", number(1))}})), "m={}");
  EXPECT_EQ(leaves_of(dict({{text("m"), module(quantized, "bits", number(1))}})), "m={}");
  EXPECT_EQ(leaves_of(dict({{text("m"), module("mine\nReader", "decoder", packed)}})), "m={}");
}

// 2000 entries share one object with 20000 attributes, which is examined only once.
TEST(TorchZipTest, SharedObjectsOfClassesCostLittle) {
  std::string pickle = "](ca\nB\n)\x81q\0}("s;
  for (int i = 0; i < 20000; ++i) pickle += "K\1N"s;
  pickle += "ub";
  for (int i = 0; i < 2000; ++i) pickle += "h\0"s;
  EXPECT_THAT(leaves_of(dict({{text("a"), pickle + kTensor + "e"}})), HasSubstr("a.2001=tensor"));
}

TEST(TorchZipTest, RefusesEveryInvalidFile) {
  const std::string directory = kTorchZip + "invalid/";
  const Value table = parse_json(content_of(directory + "expect.json"), "expect.json");
  for (const auto& [name, row] : *table.get_if<Value::Dict>()) {
    const std::string path = directory + *name.get_if<std::string>();
    SCOPED_TRACE(path);
    try {
      read_everything(*open_file(path));
      ADD_FAILURE() << "was accepted";
    } catch (const Error& error) {
      EXPECT_THAT(error.kind(), testing::AnyOf(ErrorKind::corruption, ErrorKind::unsupported));
      EXPECT_THAT(error.what(), HasSubstr(path));
      for (const Value& word : *row.find("contains")->get_if<Value::List>()) {
        EXPECT_THAT(error.what(), HasSubstr(*word.get_if<std::string>()));
      }
    }
  }
}

TEST(TorchZipTest, ThePageListsEveryGlobal) {
  const std::string page = content_of(test::fixture("../docs/formats/torch_zip.md"));
  for (const auto& table : {pickle::value_globals(), torch_zip::tensor_globals()}) {
    for (const pickle::AllowedGlobal& global : table) {
      const std::string module(global.module == "__builtin__" ? "builtins" : global.module);
      EXPECT_THAT(page, HasSubstr("`" + module + "." + std::string(global.name) + "`"));
    }
  }
}

TEST(TorchZipTest, ObjectsAreCutWhereDcpCutsThem) {
  const std::string one = number(1);
  const std::string empty_dict = "}";
  const std::pair<std::string, std::string> cases[] = {
      {dict({{text("a"), kTensor}, {text("b"), one}}), "a=tensor b=1"},
      {dict({{text("a"), dict({{text("b"), dict({{text("c"), one}})}})}}), "a.b.c=1"},
      {dict({{number(7), one}, {"\x88", one}, {"N", one}}), "7=1 True=1 None=1"},
      {dict({{tuple({one, one}), one}}), "(1, 1)=1"},
      {dict({{text("a"), empty_dict}}), "a={}"},
      {dict({{text("a"), "]"}, {text("b"), ")"}}), "a=[] b={\"$tuple\":[]}"},
      // lists: opened for a tensor, a dict or a list that is opened
      {dict({{text("l"), list({one, one})}}), "l=[1,1]"},
      {dict({{text("l"), list({one, kTensor})}}), "l.0=1 l.1=tensor"},
      {dict({{text("l"), list({one, list({list({kTensor})})})}}), "l.0=1 l.1.0.0=tensor"},
      {dict({{text("l"), list({list({one}), list({kTensor})})}}), "l.0=[1] l.1.0=tensor"},
      {dict({{text("l"), list({dict({{text("lr"), one}})})}}), "l.0.lr=1"},
      {dict({{text("l"), list({empty_dict})}}), "l.0={}"},
      // tuples: opened for a tensor at any depth
      {dict({{text("t"), tuple({one, kTensor})}}), "t.0=1 t.1=tensor"},
      {dict({{text("t"), tuple({tuple({list({kTensor})})})}}), "t.0.0.0=tensor"},
      {dict({{text("t"), tuple({dict({{text("a"), kTensor}})})}}), "t.0.a=tensor"},
      {dict({{text("t"), tuple({dict({{text("a"), one}})})}}), "t={\"$tuple\":[{\"a\":1}]}"},
      {dict({{text("l"), list({tuple({dict({{text("a"), one}})})})}}),
       "l=[{\"$tuple\":[{\"a\":1}]}]"},
      {dict({{text("l"), list({tuple({kTensor})})}}), "l.0.0=tensor"},
      // roots
      {list({kTensor, one}), "0=tensor 1=1"},
      {kTensor, "=tensor"},
      {one, "=1"},
      {empty_dict, ""},
      // TorchScript's typed containers
      {dict({{text("l"), "ctorch.jit._pickle\nbuild_intlist\n" + tuple({list({one})}) + "R"}}),
       "l=[1]"},
      {dict({{text("l"),
              "ctorch.jit._pickle\nbuild_tensorlist\n" + tuple({list({kTensor})}) + "R"}}),
       "l.0=tensor"},
  };
  for (const auto& [pickle, leaves] : cases) {
    SCOPED_TRACE(leaves);
    EXPECT_EQ(leaves_of(pickle), leaves);
  }
}

TEST(TorchZipTest, TensorsInOddPlacesAreRefusedValues) {
  const std::string cases[] = {
      dict({{text("s"), "cbuiltins\nset\n" + tuple({list({kTensor})}) + "R"}}),
      dict({{kTensor, number(1)}}),
      dict({{text("a"), "ctorch\nFloatStorage\n"}}),
      dict({{text("a"), "ctorch._utils\n_rebuild_tensor_v2\n"}}),
  };
  for (const std::string& pickle : cases) {
    EXPECT_THAT(leaves_of(pickle), AnyOf(HasSubstr("plain value"), HasSubstr("with the key")));
  }
}

TEST(TorchZipTest, SharedAndEndlessObjectsCostLittle) {
  // 2^60 ways to one tensor
  std::string doubling = list({kTensor}) + "q\0"s;
  for (char i = 0; i < 60; ++i) doubling += "0](h"s + i + "h" + i + "eq" + static_cast<char>(i + 1);
  EXPECT_THAT([&] { leaves_of(doubling); }, ThrowsError(ErrorKind::corruption, "far more"));
  std::string dicts = dict({{text("a"), kTensor}}) + "q\0"s;
  for (char i = 0; i < 60; ++i) {
    dicts += "0}(" + text("a") + "h" + i + text("b") + "h" + i + "uq" + static_cast<char>(i + 1);
  }
  EXPECT_THAT([&] { leaves_of(dicts); }, ThrowsError(ErrorKind::corruption, "far more"));
  EXPECT_THAT([&] { leaves_of("}q\0"s + text("a") + "h\0s"s); },
              ThrowsError(ErrorKind::corruption, "contains itself"));
  EXPECT_THAT([&] { leaves_of("]q\0(h\0"s + kTensor + "e"); },
              ThrowsError(ErrorKind::corruption, "contains itself"));
  // a typed container in itself
  EXPECT_THAT([&] { leaves_of("]q\0ctorch.jit._pickle\nbuild_intlist\nh\0\x85Rq\1a"s); },
              ThrowsError(ErrorKind::corruption, "contains itself"));
}

TEST(TorchZipTest, EqualViewsAreAliasesOfTheFirstName) {
  const auto reader = open_file(kTorchZip + "valid/shared.pt");
  const CheckpointContents& contents = reader->contents();
  std::vector<std::string> aliases;
  for (const Alias& alias : contents.aliases) aliases.push_back(alias.fqn + " " + alias.target);
  EXPECT_THAT(aliases, ElementsAre("model.head.weight model.emb.weight", "twice.b twice.a"));
  // Other windows of the same storage stay tensors, and so do empty ones.
  EXPECT_NE(contents.find_tensor("parts.0"), nullptr);
  EXPECT_TRUE(open_file(kTorchZip + "valid/views.pt")->contents().aliases.empty());
  EXPECT_EQ(contents.aliases[0].key_path, (KeyPath{"model"s, "head.weight"s}));
}

// Loaders of safetensors, which stores a tied tensor once, look for the name of the embedding.
TEST(TorchZipTest, ATiedTensorHasItsFirstNameInThePickle) {
  const test::TemporaryDirectory directory;
  const auto aliases_of = [&](const std::string& pickle) {
    std::ofstream(directory / "x.pt", std::ios::binary) << archive(pickle, std::string(8, 'a'));
    const auto reader = open_file(directory / "x.pt");
    EXPECT_EQ(reader->contents().tensors.size(), 1u);
    std::vector<std::string> aliases;
    for (const Alias& alias : reader->contents().aliases) {
      aliases.push_back(alias.fqn + " " + alias.target);
    }
    return aliases;
  };
  EXPECT_THAT(
      aliases_of(
          dict({{text("shared"), kTensor}, {text("embed"), kTensor}, {text("lm_head"), kTensor}})),
      ElementsAre("embed shared", "lm_head shared"));
  // Names of optimizer state come last, wherever the optimizer is.
  const auto state_of = [&](const std::string& parameter) {
    return dict({{text("state"), dict({{parameter, dict({{text("master"), kTensor}})}})}});
  };
  EXPECT_THAT(aliases_of(dict({{text("optimizer"), state_of(text("w"))},
                               {text("state_dict"), dict({{text("w"), kTensor}})}})),
              ElementsAre("optimizer.state.w.master state_dict.w"));
  EXPECT_THAT(aliases_of(dict({{text("adam"), state_of(number(0))}, {text("net"), kTensor}})),
              ElementsAre("adam.state.0.master net"));
}

TEST(TorchZipTest, KeyPathsSayWhereANameCameFrom) {
  const auto reader = open_file(kTorchZip + "valid/lists.pt");
  EXPECT_EQ(reader->contents().find_tensor("1.1.0")->key_path,
            (KeyPath{std::int64_t{1}, std::int64_t{1}, std::int64_t{0}}));
  EXPECT_EQ(reader->contents().find_tensor("3.k")->key_path, (KeyPath{std::int64_t{3}, "k"s}));
  EXPECT_EQ(open_file(kTorchZip + "valid/no_crc.pt")->contents().find_tensor("weight")->key_path,
            KeyPath{});
}

TEST(TorchZipTest, ASingleTensorOrValueHasAName) {
  const test::TemporaryDirectory directory;
  const auto name_of = [&](const std::string& pickle) {
    std::ofstream(directory / "x.pt", std::ios::binary) << archive(pickle, std::string(8, 'a'));
    const auto reader = open_file(directory / "x.pt");
    const std::string name = reader->contents().tensors.empty()
                                 ? reader->contents().values[0].name
                                 : reader->contents().tensors[0].meta.fqn;
    EXPECT_NE(reader->contents().opening_findings.at(0).found.find("with the key '" + name + "'"),
              std::string::npos);
    return name;
  };
  EXPECT_EQ(name_of(kTensor), "tensor");
  EXPECT_EQ(name_of(number(3)), "value");
}

TEST(TorchZipTest, TorchScriptGivesTensorsWithoutItsCode) {
  const auto reader = open_file(kTorchZip + "valid/torchscript.pt");
  ASSERT_EQ(reader->contents().aliases.size(), 1u);
  EXPECT_EQ(reader->contents().aliases[0].fqn, "head.weight");
  const auto& values = reader->contents().values;
  const auto scale = std::find_if(values.begin(), values.end(),
                                  [](const ValueEntry& value) { return value.name == "scale"; });
  ASSERT_NE(scale, values.end());
  EXPECT_EQ(reader->read_value(static_cast<std::size_t>(scale - values.begin())), Value(0.5));
  // Outside TorchScript archives, classes of `__torch__` are foreign classes.
  EXPECT_EQ(leaves_of("c__torch__\nM\n)\x81}b"),
            "=<pickle: object of class __torch__.M; nothing was executed>");
}

// Compares views of every kind with the definition: element i of the view is at offset + sum(index
// * stride).
TEST(TorchZipTest, ViewsReadRowMajorWhateverTheirStrides) {
  std::mt19937_64 random(11);
  const auto below = [&](std::int64_t end) {
    return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(end));
  };
  const std::pair<std::string, std::int64_t> types[] = {{"ByteStorage", 1},
                                                        {"HalfStorage", 2},
                                                        {"FloatStorage", 4},
                                                        {"DoubleStorage", 8},
                                                        {"ComplexDoubleStorage", 16}};
  for (int round = 0; round < 300; ++round) {
    const auto& [type, element_nbytes] = types[round % 5];
    Shape shape;
    Shape strides;
    for (std::int64_t dim = below(5); dim > 0; --dim) {
      shape.push_back(1 + below(7));
      strides.push_back(below(3) == 0 ? below(40) : 1 + below(4));
    }
    const std::int64_t offset = below(10);
    std::int64_t numel = offset + 1;
    for (std::size_t i = 0; i < shape.size(); ++i) numel += (shape[i] - 1) * strides[i];
    std::string storage(static_cast<std::size_t>(numel * element_nbytes), '\0');
    for (char& byte : storage) byte = static_cast<char>(random());

    const MemoryFile file(archive(tensor(type, numel, offset, shape, strides), storage));
    const TorchArchive archive(file, {0, file.nbytes()});
    const auto record = std::get<TensorRecord>(archive.leaves().at(0).content);
    std::string expected;
    const std::int64_t view_numel = numel_of(shape);
    for (std::int64_t i = 0; i < view_numel; ++i) {
      std::int64_t rest = i;
      std::int64_t at = offset;
      for (std::size_t dim = shape.size(); dim-- > 0;) {
        at += rest % shape[dim] * strides[dim];
        rest /= shape[dim];
      }
      expected += storage.substr(static_cast<std::size_t>(at * element_nbytes),
                                 static_cast<std::size_t>(element_nbytes));
    }
    const std::int64_t begin = below(view_numel + 1);
    for (const FlatRange range :
         {FlatRange{0, view_numel}, FlatRange{begin, begin + below(view_numel - begin + 1)}}) {
      SCOPED_TRACE(testing::Message()
                   << "round " << round << " " << shape_to_string(shape) << " "
                   << shape_to_string(strides) << " " << range.begin << " " << range.end);
      std::string found(static_cast<std::size_t>(range.numel() * element_nbytes), '\xee');
      archive.read_elements(record, "w", range, std::as_writable_bytes(std::span(found)));
      EXPECT_EQ(found, expected.substr(static_cast<std::size_t>(range.begin * element_nbytes),
                                       found.size()));
    }
  }
}

struct LargeView {
  const char* name;
  Shape shape;
  Shape strides;
  std::uint64_t max_nbytes_read;
};

// The views are larger than one read, so that errors at the borders of reads show.
TEST(TorchZipTest, LargeViewsAreReadInStorageOrder) {
  constexpr std::int64_t kRows = 1500;
  constexpr std::int64_t kColumns = 1201;
  std::vector<std::int32_t> storage(kRows * kColumns);
  std::iota(storage.begin(), storage.end(), 0);
  const std::string bytes(reinterpret_cast<const char*>(storage.data()), storage.size() * 4);
  const LargeView views[] = {
      {"transposed", {kColumns, kRows}, {1, kColumns}, bytes.size()},
      {"column", {kRows}, {kColumns}, bytes.size()},
      {"every tenth row", {kRows / 10, kColumns}, {10 * kColumns, 1}, bytes.size() / 10},
      {"block", {kRows, 100}, {kColumns, 1}, bytes.size()},
      {"few far elements", {30}, {50 * kColumns}, 30 * 4},
      {"expanded rows", {40, kColumns}, {0, 1}, kColumns * 4},
      {"windows", {1000, 1000}, {1000, 1}, bytes.size()},
      {"overlapping windows", {2000, 900}, {3, 1}, bytes.size()},
      {"three dimensions", {20, 1201, 75}, {1201 * 75, 1, 1201}, bytes.size()},
  };
  for (const LargeView& view : views) {
    SCOPED_TRACE(view.name);
    const MemoryFile file(
        archive(tensor("IntStorage", kRows * kColumns, 0, view.shape, view.strides), bytes));
    const TorchArchive archive(file, {0, file.nbytes()});
    const auto record = std::get<TensorRecord>(archive.leaves().at(0).content);
    const std::uint64_t read_before = file.num_bytes_read();
    std::vector<std::int32_t> found(static_cast<std::size_t>(numel_of(view.shape)), -1);
    archive.read_elements(record, "w", {0, numel_of(view.shape)},
                          std::as_writable_bytes(std::span(found)));
    EXPECT_LE(file.num_bytes_read() - read_before, view.max_nbytes_read + 1000);
    std::size_t num_wrong = 0;
    for (std::size_t i = 0; i < found.size(); ++i) {
      auto rest = static_cast<std::int64_t>(i);
      std::int64_t at = 0;
      for (std::size_t dim = view.shape.size(); dim-- > 0;) {
        at += rest % view.shape[dim] * view.strides[dim];
        rest /= view.shape[dim];
      }
      num_wrong += found[i] != at;
    }
    EXPECT_EQ(num_wrong, 0u);
  }
}

TEST(TorchZipTest, AnExpandedTensorIsBelievedUpToALimit) {
  const auto leaves = [](std::int64_t size) {
    return leaves_of(tensor("FloatStorage", 2, 0, {size}, {0}));
  };
  EXPECT_EQ(leaves(1 << 28), "=tensor");  // 1 GiB
  EXPECT_THAT(leaves(1 << 29), testing::StartsWith("=<pickle: expanded size: expected at most "));
}

TEST(TorchZipTest, ExpandedTensorsAreBelievedUpToALimitOfTheWholeFile) {
  const auto expanded = [](std::int64_t size) { return tensor("FloatStorage", 2, 0, {size}, {0}); };
  // Each alone is within the limit. One tensor of two names counts once.
  const std::string half = expanded(1 << 27);
  EXPECT_EQ(leaves_of(dict({{text("a"), half + "q\1"}, {text("b"), "h\1"}, {text("c"), half}})),
            "a=tensor b=tensor c=tensor");
  EXPECT_THAT(leaves_of(dict(
                  {{text("a"), half}, {text("b"), half}, {text("c"), half}, {text("d"), kTensor}})),
              AllOf(testing::StartsWith("a=tensor b=tensor c=<pickle: expanded size"),
                    testing::EndsWith("> d=tensor")));
}

// The CRC of a storage is also checked if the storage is read in ranges, by several threads and
// through two tensors.
TEST(TorchZipTest, FlippedBitsAreFoundWhileReadingInRanges) {
  constexpr std::int64_t kNumel = 100000;
  std::string storage(kNumel * 4, '\0');
  std::mt19937 random(3);
  for (char& byte : storage) byte = static_cast<char>(random());
  const std::string pickle =
      dict({{text("front"), tensor("FloatStorage", kNumel, 0, {kNumel / 2}, {1})},
            {text("back"), tensor("FloatStorage", kNumel, kNumel / 2, {kNumel / 2}, {1})}});
  const auto read_in_ranges = [](const MemoryFile& file) {
    const TorchArchive archive(file, {0, file.nbytes()});
    std::vector<std::pair<TensorRecord, FlatRange>> ranges;
    for (const Leaf& leaf : archive.leaves()) {
      for (std::int64_t begin = 0; begin < kNumel / 2; begin += 700) {
        ranges.emplace_back(std::get<TensorRecord>(leaf.content),
                            FlatRange{begin, std::min(begin + 700, kNumel / 2)});
      }
    }
    std::mt19937 order(4);
    std::shuffle(ranges.begin(), ranges.end(), order);
    ranges.push_back(ranges.front());  // and one of them twice
    parallel_for(static_cast<std::int64_t>(ranges.size()), 4, {}, [&](std::int64_t i) {
      const auto& [record, range] = ranges[static_cast<std::size_t>(i)];
      std::vector<std::byte> bytes(static_cast<std::size_t>(range.numel() * 4));
      archive.read_elements(record, "w", range, bytes);
    });
  };
  std::string bytes = archive(pickle, storage);
  EXPECT_NO_THROW(read_in_ranges(MemoryFile(bytes)));
  bytes[bytes.find(storage.substr(0, 20)) + 123456] ^= 0x10;
  EXPECT_THAT([&] { read_in_ranges(MemoryFile(bytes)); },
              ThrowsError(ErrorKind::corruption, "CRC-32 of 'x/data/0'"));
}

std::vector<Finding> checked_findings_of(const CheckpointReader& reader) {
  std::vector<Finding> findings;
  std::uint64_t nbytes = 0;
  reader.verify([&](const Finding& finding) { findings.push_back(finding); },
                [&](std::uint64_t num_read) { nbytes += num_read; });
  if (!reader.contents().tensors.empty()) {
    EXPECT_GT(nbytes, 0u);
  }
  return findings;
}

TEST(TorchZipTest, VerifyFindsNothingInSoundFiles) {
  for (const char* name : {"shared.pt", "training_state.pt", "degenerate.pt"}) {
    EXPECT_TRUE(checked_findings_of(*open_file(kTorchZip + "valid/" + name)).empty()) << name;
  }
}

TEST(TorchZipTest, VerifyNotesTheCodeOfTorchScript) {
  const std::vector<Finding> findings =
      checked_findings_of(*open_file(kTorchZip + "valid/torchscript.pt"));
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_EQ(findings[0].severity, Finding::Severity::note);
  EXPECT_EQ(findings[0].rule, "records");
  EXPECT_THAT(findings[0].found, HasSubstr("9 other records, which a move leaves out: "
                                           "'archive/code/__torch__.py', "));
}

TEST(TorchZipTest, VerifyNotesObjectsOfClassesAndHiddenNames) {
  const auto notes_of = [](const std::string& name) {
    std::string text;
    for (const Finding& finding : checked_findings_of(*open_file(kTorchZip + name))) {
      EXPECT_EQ(finding.severity, Finding::Severity::note);
      text += finding.rule + " " + finding.where.fqn + ": " + finding.found + "\n";
    }
    return text;
  };
  EXPECT_THAT(notes_of("classes/megatron.pt"),
              AllOf(HasSubstr("value args: pickle: object of class argparse.Namespace"),
                    HasSubstr("foreign : argparse.Namespace, megatron.core.enums.ModelType")));
  EXPECT_THAT(notes_of("classes/hidden_calls.pt"),
              HasSubstr("foreign : builtins.eval, os.system; nothing"));
  EXPECT_EQ(notes_of("valid/state_dict.pt"), "");
}

TEST(TorchZipTest, VerifySaysWhereNoCrcIs) {
  const std::vector<Finding> findings =
      checked_findings_of(*open_file(kTorchZip + "valid/no_crc.pt"));
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_EQ(findings[0].rule, "crc-absent");
  EXPECT_EQ(findings[0].severity, Finding::Severity::note);
  EXPECT_EQ(findings[0].found, "none for 7");
}

TEST(TorchZipTest, VerifyNamesTheTensorOfADamagedStorage) {
  const std::vector<Finding> findings =
      checked_findings_of(*open_file(kTorchZip + "invalid/zip_crc.pt"));
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_EQ(findings[0].rule, "checksum");
  EXPECT_EQ(findings[0].severity, Finding::Severity::error);
  EXPECT_EQ(findings[0].where.fqn, "weight");
  EXPECT_TRUE(findings[0].where.byte_range.has_value());
}

// verify must report the fault of each invalid file that opens.
TEST(TorchZipTest, VerifyFindsEveryInvalidFileThatOpens) {
  const std::string directory = kTorchZip + "invalid/";
  int num_opened = 0;
  for (const std::string& name : FileSystem::posix().list_directory(directory)) {
    if (!name.ends_with(".pt")) continue;
    SCOPED_TRACE(name);
    std::unique_ptr<CheckpointReader> reader;
    try {
      reader = open_file(directory + name);
    } catch (const Error&) {
      continue;
    }
    ++num_opened;
    const std::vector<Finding> findings = checked_findings_of(*reader);
    ASSERT_FALSE(findings.empty());
    const auto is_found = [](const Finding& finding) {
      return finding.severity == Finding::Severity::error || finding.rule == "value";
    };
    EXPECT_TRUE(std::ranges::any_of(findings, is_found));
  }
  EXPECT_GE(num_opened, 1);
}

TEST(TorchZipTest, PieceStorageIsARangeWhereTheTensorIsOne) {
  const std::string path = kTorchZip + "valid/views.pt";
  const auto reader = open_file(path);
  const std::string content = content_of(path);
  for (std::size_t i = 0; i < reader->contents().tensors.size(); ++i) {
    const PieceStorage storage = reader->piece_storage(i, 0);
    EXPECT_EQ(storage.file, "views.pt");
    if (!storage.byte_range) continue;
    const Bytes bytes = test::whole_tensor(*reader, i);
    EXPECT_EQ(content.substr(storage.byte_range->begin, storage.byte_range->nbytes()),
              std::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
  }
  const auto index_of = [&](std::string_view name) {
    return static_cast<std::size_t>(reader->contents().find_tensor(name) -
                                    reader->contents().tensors.data());
  };
  EXPECT_TRUE(reader->piece_storage(index_of("row"), 0).byte_range.has_value());
  EXPECT_FALSE(reader->piece_storage(index_of("transposed"), 0).byte_range.has_value());
  EXPECT_FALSE(reader->piece_storage(index_of("empty"), 0).byte_range.has_value());
}

TEST(TorchZipTest, EveryTruncationIsRefused) {
  const std::string whole = content_of(kTorchZip + "valid/protocol_4.pt");
  for (std::size_t nbytes = 0; nbytes < whole.size(); ++nbytes) {
    SCOPED_TRACE(nbytes);
    const MemoryFile file(whole.substr(0, nbytes));
    EXPECT_THAT([&] { TorchArchive(file, {0, nbytes}); }, testing::Throws<Error>());
  }
}

void read_if_sound(const std::string& bytes) {
  try {
    const MemoryFile file(bytes);
    const TorchArchive archive(file, {0, bytes.size()});
    for (const Leaf& leaf : archive.leaves()) {
      const auto* record = std::get_if<TensorRecord>(&leaf.content);
      if (record == nullptr || numel_of(record->shape) > 100000) continue;
      std::vector<std::byte> out(static_cast<std::size_t>(numel_of(record->shape)) *
                                 itemsize(record->dtype));
      archive.read_elements(*record, "w", {0, numel_of(record->shape)}, out);
    }
  } catch (const Error&) {
  }
}

std::string damage(std::string bytes, std::mt19937& random) {
  for (std::uint32_t k = 0; k < 1 + random() % 4; ++k) {
    bytes[random() % bytes.size()] = static_cast<char>(random() % 3 == 0 ? 0xff : random());
  }
  return bytes;
}

TEST(TorchZipTest, DamagedBytesNeverCrash) {
  std::mt19937 random(9);
  for (const char* name : {"objects.pt", "torchscript.pt", "views.pt", "conj_neg.pt"}) {
    const std::string whole = content_of(kTorchZip + "valid/" + name);
    for (int round = 0; round < 500; ++round) read_if_sound(damage(whole, random));
    // and with damage only in the pickle, and with a correct CRC
    const MemoryFile file(whole);
    const zip::ZipReader zip(file, {0, whole.size()});
    std::vector<test::ZipMember> members;
    std::size_t pickle = 0;
    for (std::size_t i = 0; i < zip.members().size(); ++i) {
      if (zip.members()[i].compression != zip::Compression::stored) continue;
      if (zip.members()[i].name.ends_with("/data.pkl")) pickle = members.size();
      const std::vector<char> data = zip.read_all(i, whole.size());
      members.push_back(
          {.name = std::string(zip.members()[i].name), .data = {data.begin(), data.end()}});
    }
    const std::string sound = members[pickle].data;
    for (int round = 0; round < 2000; ++round) {
      members[pickle].data = damage(sound, random);
      read_if_sound(test::zip_bytes(members));
    }
  }
}

TEST(TorchZipTest, EveryTruncationOfAStreamIsRefused) {
  const std::string whole = content_of(kTorchZip + "valid/stream_protocol_4.pt");
  for (std::size_t nbytes = 0; nbytes < whole.size(); ++nbytes) {
    SCOPED_TRACE(nbytes);
    const MemoryFile file(whole.substr(0, nbytes));
    EXPECT_THAT([&] { TorchStream{file}; }, testing::Throws<Error>());
  }
}

TEST(TorchZipTest, DamagedStreamsNeverCrash) {
  std::mt19937 random(10);
  for (const char* name : {"stream.pt", "stream_protocol_1.pt"}) {
    const std::string whole = content_of(kTorchZip + "valid/" + name);
    for (int round = 0; round < 2000; ++round) {
      try {
        read_everything(
            *torch_zip::read_torch_zip(std::make_unique<MemoryFile>(damage(whole, random))));
      } catch (const Error&) {
      }
    }
  }
}

TEST(TorchZipTest, AStreamNamesTheClassOfAModuleByAnId) {
  const std::string linear =
      tuple({text("module"), "c__main__\nNet\n", text("net.py"), text("class Net: ...")}) + "Q";
  const std::string attributes = dict({{text("_parameters"), dict({{text("weight"), kTensor}})},
                                       {text("_buffers"), dict({})},
                                       {text("_modules"), dict({})}});
  const MemoryFile file(stream(dict({{text("net"), linear + ")\x81" + attributes + "b"}})));
  const std::vector<Leaf> leaves = TorchStream(file).leaves();
  ASSERT_EQ(leaves.size(), 1u);
  EXPECT_EQ(spell(leaves[0].path), "net.weight");
  EXPECT_TRUE(std::holds_alternative<TensorRecord>(leaves[0].content));
}

TEST(TorchZipTest, AStorageOfAStreamMayBeAViewOfAnother) {
  const std::string storage =
      tuple({text("storage"), "ctorch\nFloatStorage\n", text("0"), text("cpu"), number(2),
             tuple({text("view"), number(1), number(1)})}) +
      "Q";
  const std::string tensor_over_view = "ctorch._utils\n_rebuild_tensor\n" +
                                       tuple({storage, number(0), numbers({1}), numbers({1})}) +
                                       "R";
  const MemoryFile file(stream(dict({{text("a"), tensor_over_view}})));
  const TorchStream saved(file);
  const std::vector<Leaf> leaves = saved.leaves();
  std::vector<std::byte> out(4);
  saved.read_elements(std::get<TensorRecord>(leaves.at(0).content), "a", {0, 1}, out);
  EXPECT_EQ(out, std::vector<std::byte>(4, std::byte{2}));
}

TEST(TorchZipTest, ComplexNumbersInAStreamOfABigEndianMachineAreRefused) {
  const MemoryFile real(stream(dict({{text("a"), kTensor}}), false));
  EXPECT_EQ(TorchStream(real).leaves().size(), 1u);
  const MemoryFile complex(
      stream(dict({{text("a"), tensor("ComplexFloatStorage", 2, 0, {2}, {1})}}), false));
  EXPECT_THAT([&] { TorchStream{complex}; },
              ThrowsError(ErrorKind::unsupported, "complex numbers of a big-endian machine"));
}

TEST(TorchZipTest, BytesOfABigEndianMachineAreNotCalledPlain) {
  EXPECT_EQ(open_file(kTorchZip + "valid/big_endian.pt")->piece_storage(0, 0).encoding,
            "big-endian");
  EXPECT_EQ(open_file(kTorchZip + "valid/stream.pt")->piece_storage(0, 0).encoding, "plain");
}

TEST(TorchZipTest, VerifySaysThatAStreamHasNoChecksums) {
  const std::vector<Finding> findings =
      checked_findings_of(*open_file(kTorchZip + "valid/stream.pt"));
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_EQ(findings[0].rule, "checksum-absent");
  EXPECT_EQ(findings[0].severity, Finding::Severity::note);
}

TEST(TorchZipTest, MissingFilesAndDirectoriesAreNotFound) {
  const test::TemporaryDirectory directory;
  EXPECT_THAT([&] { open_file(directory / "none.pt"); },
              ThrowsError(ErrorKind::not_found, "none.pt"));
  EXPECT_THAT([&] { open_file(directory.path()); },
              ThrowsError(ErrorKind::not_found, directory.path()));
}

}  // namespace
}  // namespace tessera::formats
