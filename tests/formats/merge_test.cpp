#include "tessera/formats/merge.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "support/memory_checkpoint.h"

namespace tessera::formats {
namespace {

using test::bytes_of;
using test::MemoryCheckpoint;
using testing::ElementsAre;
using testing::IsEmpty;

MemoryCheckpoint model() {
  MemoryCheckpoint checkpoint("model", 2);
  checkpoint.add({"w", DType::float32, {4}}, bytes_of<float>({1, 2, 3, 4}),
                 {{Box{{0}, {2}}, 0}, {Box{{2}, {2}}, 1}});
  checkpoint.add({"a.b", DType::float32, {1}}, bytes_of<float>({5})).key_path = {"a", "b"};
  checkpoint.add_alias("tied", "w");
  checkpoint.add_value("epoch", 1);
  checkpoint.contents_for_change().annotations = {{"format", "pt"}};
  checkpoint.contents_for_change().units = {make_flat_unit("", DType::float32, {{"w", {4}}})};
  return checkpoint;
}

/// The optimizer state of the model above, without the model.
MemoryCheckpoint optimizer() {
  MemoryCheckpoint checkpoint("optimizer", 3);
  TensorEntry& state = checkpoint.add({"state.w.exp_avg", DType::float32, {4}},
                                      bytes_of<float>({6, 7, 8, 9}), {{FlatRange{0, 4}, 2}});
  state.kind = StateKind::pointwise;
  state.parameter = "w";
  checkpoint.add_value("param_groups", Value::List{});
  checkpoint.contents_for_change().annotations = {{"format", "pt"}, {"by", "a test"}};
  return checkpoint;
}

MergedCheckpoint merged(std::vector<std::pair<std::string, MemoryCheckpoint>> sources,
                        MergePreference preference = MergePreference::none) {
  std::vector<MergeSource> merge;
  for (auto& [prefix, source] : sources) {
    merge.push_back({std::make_unique<MemoryCheckpoint>(std::move(source)), prefix});
  }
  return merge_checkpoints(std::move(merge), preference);
}

std::vector<std::string> all_names_of(const CheckpointContents& contents) {
  std::vector<std::string> names;
  for (const TensorEntry& tensor : contents.tensors) names.push_back(tensor.meta.fqn);
  for (const ValueEntry& value : contents.values) names.push_back(value.name);
  for (const Alias& alias : contents.aliases) names.push_back(alias.fqn + " = " + alias.target);
  return names;
}

const TensorEntry& tensor(const CheckpointReader& reader, std::string_view fqn) {
  return *reader.contents().find_tensor(fqn);
}

test::Bytes bytes(const CheckpointReader& reader, std::string_view fqn) {
  const auto index = &tensor(reader, fqn) - reader.contents().tensors.data();
  return test::whole_tensor(reader, static_cast<std::size_t>(index));
}

/// One of two files. Each has a tensor that the other lacks.
MemoryCheckpoint file_of_two(std::uint64_t number) {
  MemoryCheckpoint checkpoint("file", 1);
  checkpoint.add({std::string(1, static_cast<char>('a' + number)), DType::float32, {1}},
                 bytes_of<float>({1}));
  checkpoint.contents_for_change().part = PartOfWhole{
      .unit = PartOfWhole::Unit::file, .num_parts = 2, .series = "model-", .number = number};
  return checkpoint;
}

TEST(MergeTest, AllFilesOfASeriesAreNoPartAnyMore) {
  EXPECT_FALSE(merged({{"", file_of_two(1)}, {"", file_of_two(2)}}).reader->contents().part);
  EXPECT_TRUE(merged({{"", file_of_two(1)}, {"", model()}}).reader->contents().part);
  EXPECT_TRUE(merged({{"x", file_of_two(1)}, {"y", file_of_two(1)}}).reader->contents().part);
  MemoryCheckpoint rank = model();
  rank.contents_for_change().part = PartOfWhole{.num_parts = 2};
  EXPECT_TRUE(merged({{"", std::move(rank)}, {"", optimizer()}}).reader->contents().part);
}

TEST(MergeTest, EverythingIsThereUnderItsPrefix) {
  const auto [reader, collisions, num_unordered_dicts] =
      merged({{"net", model()}, {"optim", optimizer()}});
  EXPECT_THAT(collisions, IsEmpty());
  const CheckpointContents& contents = reader->contents();
  EXPECT_THAT(all_names_of(contents),
              ElementsAre("net.a.b", "net.w", "optim.state.w.exp_avg", "net.epoch",
                          "optim.param_groups", "net.tied = net.w"));
  EXPECT_EQ(contents.world_size, 3);
  EXPECT_EQ(tensor(*reader, "net.a.b").key_path, (KeyPath{"net", "a", "b"}));
  EXPECT_EQ(tensor(*reader, "net.w").key_path, (KeyPath{"net", "w"}));
  EXPECT_EQ(contents.aliases[0].key_path, (KeyPath{"net", "tied"}));
  EXPECT_EQ(tensor(*reader, "net.w").pieces, model().contents().find_tensor("w")->pieces);
  EXPECT_EQ(bytes(*reader, "net.w"), bytes_of<float>({1, 2, 3, 4}));
  EXPECT_EQ(bytes(*reader, "optim.state.w.exp_avg"), bytes_of<float>({6, 7, 8, 9}));
  EXPECT_EQ(reader->read_value(0), Value(1));
  EXPECT_EQ(reader->read_value(1), Value(Value::List{}));
  EXPECT_THAT(contents.units, ElementsAre(make_flat_unit("net", DType::float32, {{"net.w", {4}}})));
  EXPECT_EQ(contents.annotations,
            (std::map<std::string, std::string>{{"by", "a test"}, {"format", "pt"}}));
}

TEST(MergeTest, AnEntryOfOneRankStaysThatRanksUnderAPrefix) {
  MemoryCheckpoint ranks("ranks", 2);
  ranks.add({"per_rank.1.rng", DType::float32, {1}}, bytes_of<float>({2}));
  ranks.add({"rng", DType::float32, {1}}, bytes_of<float>({1}));
  ranks.contents_for_change().tensors[0].key_path = KeyPath{"per_rank", "1", "rng"};
  const auto with_paths = merged({{"net", std::move(ranks)}});
  EXPECT_THAT(all_names_of(with_paths.reader->contents()),
              ElementsAre("net.rng", "per_rank.1.net.rng"));
  EXPECT_EQ(tensor(*with_paths.reader, "per_rank.1.net.rng").key_path,
            (KeyPath{"per_rank", "1", "net", "rng"}));
  EXPECT_EQ(bytes(*with_paths.reader, "per_rank.1.net.rng"), bytes_of<float>({2}));
  MemoryCheckpoint flat("flat", 2);
  flat.add({"per_rank.1.rng", DType::float32, {1}}, bytes_of<float>({2}));
  const auto without = merged({{"net", std::move(flat)}});
  EXPECT_EQ(tensor(*without.reader, "per_rank.1.net.rng").key_path, KeyPath{"per_rank.1.net.rng"});
}

TEST(MergeTest, KeysThatAreNoRanksAreOfNoRank) {
  MemoryCheckpoint source("source", 2);
  source.add_value("per_rank.-0.rng", 1);
  source.add_value("per_rank.01.rng", 1);
  source.add_value("per_rank.{rank}.rng", 1);
  EXPECT_THAT(all_names_of(merged({{"net", std::move(source)}}).reader->contents()),
              ElementsAre("net.per_rank.-0.rng", "net.per_rank.01.rng", "net.per_rank.{rank}.rng"));
}

/// A run whose ranks have states of their own, `first` + rank.
MemoryCheckpoint run_of_ranks(int world_size, float first) {
  MemoryCheckpoint run("run of " + std::to_string(world_size), world_size);
  for (int rank = 1; rank < world_size; ++rank) {
    const std::string own = "per_rank." + std::to_string(rank);
    run.add({own + ".rng", DType::float32, {1}},
            bytes_of<float>({first + static_cast<float>(rank)}));
    run.add_value(own + ".seed", static_cast<int>(first) + rank);
  }
  run.add({"rng", DType::float32, {1}}, bytes_of<float>({first}));
  run.add_value("seed", static_cast<int>(first));
  return run;
}

TEST(MergeTest, APreferenceDoesNotMixADictWithWhatARankHasInItsPlace) {
  MemoryCheckpoint a("a", 2);
  a.add_value("m.s", 1);
  a.add_value("m.t", 2);
  MemoryCheckpoint b("b", 2);
  b.add_value("m.s", 3);
  b.add_value("m.t", 4);
  b.add_value("per_rank.1.m", Value::List{1});
  EXPECT_THAT(all_names_of(merged({{"", a}, {"", b}}, MergePreference::first).reader->contents()),
              ElementsAre("m.s", "m.t"));
  EXPECT_THAT(all_names_of(merged({{"", a}, {"", b}}, MergePreference::last).reader->contents()),
              ElementsAre("m.s", "m.t", "per_rank.1.m"));

  MemoryCheckpoint whole("whole", 2);
  whole.add_value("m", 1);
  MemoryCheckpoint dict("dict", 2);
  dict.add_value("m", 2);
  dict.add_value("per_rank.1.m.s", 3);
  EXPECT_THAT(
      all_names_of(merged({{"", whole}, {"", dict}}, MergePreference::first).reader->contents()),
      ElementsAre("m"));
}

TEST(MergeTest, APreferenceDoesNotMixTheRanksOfTwoRuns) {
  const auto notes_of = [](const MergedCheckpoint& merge) {
    std::vector<std::string> found;
    for (const Finding& note : merge.reader->contents().opening_findings) {
      found.push_back(note.found);
    }
    return found;
  };
  const std::string left_out =
      "entries of single ranks, whose shared entry is taken from another source (left out): ";
  const auto first =
      merged({{"", run_of_ranks(2, 10)}, {"", run_of_ranks(4, 20)}}, MergePreference::first);
  EXPECT_THAT(all_names_of(first.reader->contents()),
              ElementsAre("per_rank.1.rng", "rng", "per_rank.1.seed", "seed"));
  EXPECT_EQ(bytes(*first.reader, "per_rank.1.rng"), bytes_of<float>({11}));
  EXPECT_THAT(notes_of(first), testing::Contains(left_out + "'per_rank.2.rng' and 3 more"));
  const auto equal_on_all_ranks =
      merged({{"", run_of_ranks(4, 20)}, {"", run_of_ranks(1, 10)}}, MergePreference::last);
  EXPECT_THAT(all_names_of(equal_on_all_ranks.reader->contents()), ElementsAre("rng", "seed"));
  const auto all =
      merged({{"", run_of_ranks(2, 10)}, {"", run_of_ranks(4, 20)}}, MergePreference::last);
  EXPECT_EQ(all.reader->contents().tensors.size(), 4U);
  EXPECT_THAT(notes_of(all), testing::Not(testing::Contains(testing::HasSubstr(left_out))));
}

TEST(MergeTest, StateBelongsToTheParameterOfAnotherSource) {
  const auto [reader, collisions, num_unordered_dicts] =
      merged({{"net", model()}, {"optim", optimizer()}});
  EXPECT_EQ(tensor(*reader, "optim.state.w.exp_avg").kind, StateKind::pointwise);
  EXPECT_EQ(tensor(*reader, "optim.state.w.exp_avg").parameter, "net.w");
  const auto alone = merged({{"optim", optimizer()}});
  EXPECT_EQ(tensor(*alone.reader, "optim.state.w.exp_avg").parameter, "optim.w");
}

TEST(MergeTest, StateOfATiedParameterBelongsToItsTensor) {
  MemoryCheckpoint state = optimizer();
  state.contents_for_change().tensors[0].parameter = "tied";  // an alias of `w` in the model
  const auto merge = merged({{"", model()}, {"", std::move(state)}});
  EXPECT_EQ(tensor(*merge.reader, "state.w.exp_avg").parameter, "w");
}

TEST(MergeTest, WhatASourceHasLostIsLost) {
  MemoryCheckpoint net = model();
  net.missing_data_for_change() = {.pieces = {{1, {{0, "r0"}}}}, .values = {{0, "r1"}}};
  ASSERT_EQ(net.contents().tensors[1].meta.fqn, "w");
  const auto [reader, collisions, num_unordered_dicts] =
      merged({{"optim", optimizer()}, {"z.net", std::move(net)}});
  const MissingData missing = reader->find_missing_data();
  ASSERT_EQ(reader->contents().tensors[2].meta.fqn, "z.net.w");
  EXPECT_EQ(missing.pieces, (std::map<std::size_t, MissingData::Pieces>{{2, {{0, "model/r0"}}}}));
  ASSERT_EQ(reader->contents().values[1].name, "z.net.epoch");
  EXPECT_EQ(missing.values, (std::map<std::size_t, std::string>{{1, "model/r1"}}));
}

TEST(MergeTest, WithoutAPrefixNamesAndKeyPathsStay) {
  const auto [reader, collisions, num_unordered_dicts] = merged({{"", model()}, {"", optimizer()}});
  EXPECT_THAT(collisions, IsEmpty());
  EXPECT_THAT(all_names_of(reader->contents()),
              ElementsAre("a.b", "state.w.exp_avg", "w", "epoch", "param_groups", "tied = w"));
  EXPECT_EQ(tensor(*reader, "a.b").key_path, (KeyPath{"a", "b"}));
  EXPECT_EQ(tensor(*reader, "w").key_path, KeyPath{});
  EXPECT_EQ(tensor(*reader, "state.w.exp_avg").parameter, "w");
}

MemoryCheckpoint patch() {
  MemoryCheckpoint checkpoint("patch");
  checkpoint.add({"w", DType::float32, {2}}, bytes_of<float>({10, 11}));
  checkpoint.add_value("a.b", 12);
  checkpoint.add_value("epoch", 2);
  checkpoint.contents_for_change().annotations = {{"format", "np"}};
  return checkpoint;
}

TEST(MergeTest, EveryCollisionIsListedWithItsSources) {
  const auto [reader, collisions, num_unordered_dicts] = merged({{"", model()}, {"", patch()}});
  std::vector<std::string> found;
  for (const Finding& finding : collisions) {
    EXPECT_EQ(finding.rule, "merge");
    found.push_back(finding.where.fqn + ": " + finding.found);
  }
  EXPECT_THAT(found, ElementsAre("a.b: model, patch", "epoch: model, patch",
                                 testing::StartsWith("w: model, patch: the parts"),
                                 "format: 'pt' in model, 'np' in patch"));
  EXPECT_EQ(remedy_to_string(collisions.back().remedy), "MergePreference takes one of them");
}

/// What one rank saved of a model: all of `b` and a shard of `w`.
MemoryCheckpoint rank_file(int rank, std::vector<float> rows) {
  MemoryCheckpoint checkpoint("model_rank_" + std::to_string(rank) + ".pt");
  const auto numel = static_cast<std::int64_t>(rows.size());
  checkpoint.add({"b", DType::float32, {2}}, bytes_of<float>({1, 2}));
  checkpoint.add({"w", DType::float32, {numel}}, bytes_of<float>(rows));
  return checkpoint;
}

TEST(MergeTest, WhatLooksLikePartsIsNotOfferedAPreference) {
  for (const std::vector<float>& second : {std::vector<float>{3, 4}, {3, 4, 5}}) {
    const auto [reader, collisions, num_unordered_dicts] =
        merged({{"", rank_file(0, {1, 2})}, {"", rank_file(1, second)}});
    ASSERT_EQ(collisions.size(), 2U);
    EXPECT_EQ(collisions[0].remedy.action, Remedy::Action::choose_source);  // equal on both
    EXPECT_EQ(collisions[1].where.fqn, "w");
    EXPECT_THAT(collisions[1].found, testing::HasSubstr("parts of one tensor"));
    EXPECT_FALSE(collisions[1].remedy);
  }
}

TEST(MergeTest, APreferenceTellsOfPartsAndOfOtherBytes) {
  const auto told = [](std::vector<std::pair<std::string, MemoryCheckpoint>> sources) {
    std::string lines;
    const auto preferred = merged(std::move(sources), MergePreference::first);
    for (const Finding& finding : preferred.reader->contents().opening_findings) {
      lines += finding.found + "\n";
    }
    return lines;
  };
  EXPECT_THAT(
      told({{"", rank_file(0, {1, 2})}, {"", rank_file(1, {3, 4})}}),
      testing::HasSubstr(
          "the others are lost; to keep all, give the folder of all ranks as one source): 'w'"));
  MemoryCheckpoint base("base");
  base.add({"w", DType::float32, {2}}, bytes_of<float>({1, 2}));
  MemoryCheckpoint patch("patch");
  patch.add({"w", DType::float32, {2}}, bytes_of<float>({3, 4}));
  EXPECT_THAT(told({{"", base}, {"", patch}}), testing::HasSubstr("different bytes"));
  EXPECT_EQ(told({{"", base}, {"", base}}), "");
}

TEST(MergeTest, APreferenceTellsOfAliasesAndValuesThatDiffer) {
  const auto found_in = [](MemoryCheckpoint first, MemoryCheckpoint second) {
    std::string found;
    const auto merge =
        merged({{"", std::move(first)}, {"", std::move(second)}}, MergePreference::first);
    for (const Finding& finding : merge.reader->contents().opening_findings) {
      found += finding.found;
    }
    return found;
  };
  MemoryCheckpoint tied("tied", 1);
  tied.add({"w", DType::float32, {1}}, bytes_of<float>({1}));
  tied.add_alias("v", "w");
  tied.add_value("lr", 1);
  MemoryCheckpoint other("other", 1);
  other.add({"v", DType::float32, {1}}, bytes_of<float>({2}));
  EXPECT_THAT(found_in(tied, other), testing::HasSubstr("different bytes"));
  MemoryCheckpoint equal("equal", 1);
  equal.add({"v", DType::float32, {1}}, bytes_of<float>({1}));
  equal.add_value("lr", 1);
  EXPECT_EQ(found_in(tied, equal), "");
  MemoryCheckpoint value("value", 1);
  value.add_value("lr", 2);
  EXPECT_THAT(found_in(tied, value), testing::HasSubstr("'lr'"));
  MemoryCheckpoint of_another_kind("kind", 1);
  of_another_kind.add_value("w", 2);
  EXPECT_THAT(found_in(tied, of_another_kind), testing::HasSubstr("'w'"));
}

TEST(MergeTest, APreferenceComparesTheBitsOfNumbers) {
  const auto is_told = [](double first, double second) {
    const auto with = [](double number) {
      MemoryCheckpoint checkpoint("source");
      checkpoint.add_value("groups", Value::List{Value::Dict{{"lr", number}}});
      return checkpoint;
    };
    const auto merge = merged({{"", with(first)}, {"", with(second)}}, MergePreference::last);
    return !merge.reader->contents().opening_findings.empty();
  };
  EXPECT_TRUE(is_told(0.0, -0.0));
  EXPECT_TRUE(is_told(std::nan(""), -std::nan("")));
  EXPECT_FALSE(is_told(-0.0, -0.0));
  EXPECT_FALSE(is_told(std::nan("1"), std::nan("1")));
}

/// A tensor of 200000 bytes, in pieces of `piece_numel` elements. Its last element is `last`.
MemoryCheckpoint large(float last, std::int64_t piece_numel) {
  std::vector<float> numbers(50000, 1.0F);
  numbers.back() = last;
  std::vector<Piece> pieces;
  for (std::int64_t begin = 0; begin < 50000; begin += piece_numel) {
    pieces.push_back({Box{{begin}, {std::min<std::int64_t>(piece_numel, 50000 - begin)}}, 0});
  }
  MemoryCheckpoint checkpoint("source");
  checkpoint.add({"w", DType::float32, {50000}}, bytes_of<float>(numbers), std::move(pieces));
  return checkpoint;
}

TEST(MergeTest, APreferenceComparesAllBytesInAnyPieces) {
  const auto is_told = [](MemoryCheckpoint first, MemoryCheckpoint second) {
    const auto merge =
        merged({{"", std::move(first)}, {"", std::move(second)}}, MergePreference::first);
    return !merge.reader->contents().opening_findings.empty();
  };
  EXPECT_TRUE(is_told(large(2, 50000), large(3, 50000)));
  EXPECT_TRUE(is_told(large(0.0F, 50000), large(-0.0F, 20000)));
  EXPECT_TRUE(is_told(large(2, 30000), large(3, 20000)));
  EXPECT_FALSE(is_told(large(2, 30000), large(2, 20000)));
}

TEST(MergeTest, APreferenceTellsOfTextsThatDiffer) {
  for (const MergePreference preference : {MergePreference::first, MergePreference::last}) {
    std::vector<std::string> found;
    const auto preferred = merged({{"a", model()}, {"b", patch()}, {"c", patch()}}, preference);
    for (const Finding& finding : preferred.reader->contents().opening_findings) {
      found.push_back(finding.found);
    }
    EXPECT_THAT(found, ElementsAre("different texts (one text is taken): 'format'"));
  }
}

TEST(MergeTest, APreferenceTakesNamesFromOneSource) {
  const auto first = merged({{"", model()}, {"", patch()}}, MergePreference::first);
  EXPECT_THAT(first.collisions, IsEmpty());
  EXPECT_THAT(all_names_of(first.reader->contents()), ElementsAre("a.b", "w", "epoch", "tied = w"));
  EXPECT_EQ(bytes(*first.reader, "w"), bytes_of<float>({1, 2, 3, 4}));
  EXPECT_EQ(first.reader->read_value(0), Value(1));
  EXPECT_EQ(first.reader->contents().annotations.at("format"), "pt");
  EXPECT_EQ(first.reader->contents().units.size(), 1);

  const auto last = merged({{"", model()}, {"", patch()}}, MergePreference::last);
  EXPECT_THAT(last.collisions, IsEmpty());
  EXPECT_EQ(bytes(*last.reader, "w"), bytes_of<float>({10, 11}));
  EXPECT_EQ(last.reader->read_value(0), Value(12));
  EXPECT_EQ(last.reader->read_value(1), Value(2));
  EXPECT_EQ(last.reader->contents().annotations.at("format"), "np");
  EXPECT_THAT(last.reader->contents().units, IsEmpty());  // w comes from the other source
}

TEST(MergeTest, AnAliasKeepsTheBytesOfATensorThatIsTakenFromElsewhere) {
  MemoryCheckpoint source = model();
  source.add_alias("tied.again", "w");
  const auto [reader, collisions, num_unordered_dicts] =
      merged({{"", std::move(source)}, {"", patch()}}, MergePreference::last);
  EXPECT_THAT(all_names_of(reader->contents()),
              ElementsAre("tied", "w", "a.b", "epoch", "tied.again = tied"));
  EXPECT_EQ(bytes(*reader, "tied"), bytes_of<float>({1, 2, 3, 4}));
  EXPECT_EQ(bytes(*reader, "w"), bytes_of<float>({10, 11}));
}

MemoryCheckpoint of_dict_and_list(const Key& key, std::int64_t num_items) {
  MemoryCheckpoint checkpoint("source", 1);
  checkpoint.add({"d.0", DType::float32, {1}}, bytes_of<float>({1})).key_path = {"d", key};
  for (std::int64_t i = 0; i < num_items; ++i) {
    const std::string name = "l." + std::to_string(i);
    checkpoint.add({name, DType::float32, {1}}, bytes_of<float>({1})).key_path = {"l", i};
  }
  return checkpoint;
}

std::vector<std::string> notes_of(const MergedCheckpoint& merge) {
  std::vector<std::string> notes;
  for (const Finding& finding : merge.reader->contents().opening_findings) {
    notes.push_back(finding.found);
  }
  return notes;
}

TEST(MergeTest, APreferenceThatDecidesOnKeysAndListsIsNoted) {
  const MergedCheckpoint mixed =
      merged({{"", of_dict_and_list(*dict_key(0), 2)}, {"", of_dict_and_list("0", 3)}},
             MergePreference::first);
  EXPECT_THAT(
      notes_of(mixed),
      ElementsAre("lists of different lengths, which are mixed item by item: 'l'",
                  "keys of different types, such as 0 and \"0\" (one entry is taken): 'd.0'"));
  const MergedCheckpoint equal = merged(
      {{"", of_dict_and_list("0", 3)}, {"", of_dict_and_list("0", 3)}}, MergePreference::last);
  EXPECT_THAT(notes_of(equal), IsEmpty());
}

TEST(MergeTest, ASourceWithoutEntriesIsNoted) {
  const MergedCheckpoint merge = merged({{"", model()}, {"optim", MemoryCheckpoint("empty", 1)}});
  EXPECT_THAT(notes_of(merge), ElementsAre("a source without any: 'empty'"));
}

MemoryCheckpoint tied_pair(const char* path, const std::string& first, const std::string& second) {
  MemoryCheckpoint checkpoint(path, 1);
  checkpoint.add({first, DType::float32, {1}}, bytes_of<float>({1}));
  checkpoint.add_alias(second, first);
  return checkpoint;
}

TEST(MergeTest, APreferenceTellsOfTiesThatComeApart) {
  const auto notes_of = [](MergePreference preference) {
    std::vector<std::string> found;
    const auto result =
        merged({{"", tied_pair("one", "a", "b")}, {"", tied_pair("two", "b", "c")}}, preference);
    for (const Finding& each : result.reader->contents().opening_findings) {
      found.push_back(each.found);
    }
    return found;
  };
  const std::string text =
      "tied tensors that become separate, because one is taken from another source: '";
  EXPECT_THAT(notes_of(MergePreference::last), ElementsAre(text + "b'"));
  EXPECT_THAT(notes_of(MergePreference::first), ElementsAre(text + "c'"));
}

MemoryCheckpoint nested(const char* path, std::vector<std::pair<KeyPath, bool>> entries) {
  MemoryCheckpoint checkpoint(path, 1);
  for (const auto& [key_path, is_value] : entries) {
    if (is_value) {
      checkpoint.add_value(spell(key_path), Value::Dict{}).key_path = key_path;
    } else {
      checkpoint.add({spell(key_path), DType::float32, {1}}, bytes_of<float>({1})).key_path =
          key_path;
    }
  }
  return checkpoint;
}

TEST(MergeTest, AnEmptyDictBecomesTheDictOfAnotherSource) {
  for (const bool is_first : {true, false}) {
    std::vector<std::pair<std::string, MemoryCheckpoint>> sources;
    MemoryCheckpoint empty("empty", 1);
    empty.add_value("s", Value::Dict{});  // a key of the outermost dict needs no path
    sources.emplace_back("", std::move(empty));
    sources.emplace_back("", nested("full", {{{"s", std::int64_t{0}}, false}}));
    if (!is_first) std::swap(sources[0], sources[1]);
    const auto [reader, collisions, num_unordered_dicts] = merged(std::move(sources));
    EXPECT_THAT(collisions, IsEmpty());
    EXPECT_THAT(all_names_of(reader->contents()), ElementsAre("s.0"));
  }
}

TEST(MergeTest, AnEntryWithinAnEntryOfAnotherSourceIsReported) {
  for (const MergePreference preference : {MergePreference::none, MergePreference::last}) {
    std::vector<std::pair<std::string, MemoryCheckpoint>> sources;
    sources.emplace_back("", nested("one", {{{"s"}, false}}));
    sources.emplace_back("", nested("two", {{{"s", "x"}, false}}));
    const auto [reader, collisions, num_unordered_dicts] = merged(std::move(sources), preference);
    ASSERT_EQ(collisions.size(), 1U);
    EXPECT_EQ(finding_to_string(collisions[0]),
              "s: merge: expected either a dict or another entry in all sources, found a dict with "
              "'s.x' in two, and a tensor in one");
  }
}

TEST(MergeTest, AnAliasOfATensorThatIsADictElsewhereKeepsTheTensor) {
  for (const bool is_first : {true, false}) {
    std::vector<std::pair<std::string, MemoryCheckpoint>> sources;
    sources.emplace_back("", tied_pair("one", "a", "b"));
    sources.emplace_back("", nested("two", {{{"a", "x"}, false}}));
    if (!is_first) std::swap(sources[0], sources[1]);
    const auto [reader, collisions, num_unordered_dicts] = merged(std::move(sources));
    ASSERT_EQ(collisions.size(), 1U);
    EXPECT_EQ(collisions[0].where.fqn, "a");
    EXPECT_THAT(all_names_of(reader->contents()), ElementsAre("a.x", "b"));
  }
}

/// Returns the collisions of a merge of these entries, as texts.
std::vector<std::string> collisions_of(const std::vector<KeyPath>& one,
                                       const std::vector<KeyPath>& two,
                                       MergePreference preference = MergePreference::none) {
  const auto all_nested = [](const char* path, const std::vector<KeyPath>& key_paths) {
    std::vector<std::pair<KeyPath, bool>> entries;
    for (const KeyPath& key_path : key_paths) entries.emplace_back(key_path, false);
    return nested(path, std::move(entries));
  };
  std::vector<std::pair<std::string, MemoryCheckpoint>> sources;
  sources.emplace_back("", all_nested("one", one));
  sources.emplace_back("", all_nested("two", two));
  std::vector<std::string> texts;
  for (const Finding& each : merged(std::move(sources), preference).collisions) {
    texts.push_back(finding_to_string(each));
  }
  return texts;
}

TEST(MergeTest, AListThatIsADictInAnotherSourceIsReported) {
  const KeyPath item{"c", std::int64_t{0}};
  const KeyPath next{"c", std::int64_t{1}};
  const std::string text =
      "c: merge: expected either a list or a dict in all sources, found a list in ";
  EXPECT_THAT(collisions_of({item, next}, {{"c", "0", "x"}}),
              ElementsAre(text + "one, and a dict with 'c.0.x' in two"));
  EXPECT_THAT(collisions_of({{"c", "m"}, {"d"}}, {item, next}),
              ElementsAre(text + "two, and a dict with 'c.m' in one"));
  EXPECT_THAT(collisions_of({item}, {{"c", *dict_key(5)}}),
              ElementsAre(text + "one, and a dict with 'c.5' in two"));
  EXPECT_THAT(collisions_of({item, next}, {{"c", "0"}}, MergePreference::last),
              ElementsAre(text + "one, and a dict with 'c.0' in two"));
  EXPECT_THAT(collisions_of({{std::int64_t{0}}}, {{"m"}}),
              ElementsAre("merge: expected either a list or a dict as the outermost object in all "
                          "sources, found a list in one, and a dict with 'm' in two"));
}

TEST(MergeTest, ListsAndDictsThatFitTogetherAreNotReported) {
  const KeyPath item{"c", std::int64_t{0}, "x"};
  EXPECT_THAT(collisions_of({item}, {{"c", std::int64_t{0}, "y"}, {"d", "0"}}), IsEmpty());
  EXPECT_THAT(collisions_of({item}, {{"c.m"}}), IsEmpty());  // a key with a dot, beside the list
  // The preferred source has all that the list has.
  EXPECT_THAT(collisions_of({{"c", std::int64_t{0}}}, {{"c", "0"}}, MergePreference::last),
              IsEmpty());
  // Entries of one rank are beside the outermost list.
  EXPECT_THAT(collisions_of({{std::int64_t{0}}}, {{"per_rank", "1", std::int64_t{0}}}), IsEmpty());
}

}  // namespace
}  // namespace tessera::formats
