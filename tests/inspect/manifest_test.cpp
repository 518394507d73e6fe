#include "inspect/manifest.h"

#include <gmock/gmock.h>

#include <algorithm>

#include "support/error_matchers.h"
#include "support/memory_checkpoint.h"

namespace tessera::inspect {
namespace {

using test::MemoryCheckpoint;
using test::ThrowsError;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ChangeKind = ManifestDifference::Kind;

Manifest manifest_of(const formats::CheckpointReader& reader) {
  return compute_manifest(reader, select(reader.contents(), NameSelection(), reader.path()), {});
}

// A checkpoint with a float32 tensor `t` of these bits. Bits, because a NaN can have any payload.
MemoryCheckpoint holding_bits(const std::vector<std::uint32_t>& bits, Shape shape,
                              std::vector<formats::Piece> pieces = {}) {
  MemoryCheckpoint checkpoint;
  checkpoint.add({"t", DType::float32, std::move(shape)}, test::bytes_of(bits), std::move(pieces));
  return checkpoint;
}

// The digests were computed with the Python code in docs/cli/ckpt-inspect.md.
TEST(ManifestTest, DigestsCanBeRecomputedElsewhere) {
  MemoryCheckpoint checkpoint;
  checkpoint.add({"empty", DType::int64, {0, 3}}, {});
  checkpoint.add({"pair", DType::float32, {2}}, test::bytes_of<float>({1, 2}));
  checkpoint.add({"scalar", DType::float32, {}}, test::bytes_of<float>({1}));
  checkpoint.add_value("eps", 1e-05);
  checkpoint.add_value(
      "group", Value::Dict{{"lr", 0.1}, {"betas", Value::Tuple{{Value(0.9), Value(0.999)}}}});
  checkpoint.add_value("text", "\x7F\b\f\xE2\x80\xA8\xC2\x85");  // DEL, U+2028, U+0085
  const Manifest manifest = manifest_of(checkpoint);
  EXPECT_THAT(manifest.entries,
              ElementsAre(Manifest::Entry{"empty", "fa5294a7330b758b07625d77712dff8b"},
                          Manifest::Entry{"eps", "4636a7c97ea11d9730780f37fc02f3a4"},
                          Manifest::Entry{"group", "27bd2432ca7ed199a26951f013cf0a57"},
                          Manifest::Entry{"pair", "ea1f2dcb79945d3ec6f4380208c5e4f4"},
                          Manifest::Entry{"scalar", "09cd880c01a2eb13e2a0de4dc9a0a92c"},
                          Manifest::Entry{"text", "64e64ca32d325147f83e5503da27e381"}));
  EXPECT_EQ(Manifest{}.whole_digest(), "99aa06d3014798d86001c324468d497f");  // of no bytes
}

TEST(ManifestTest, APartIsReadBackAsAPart) {
  Manifest manifest = manifest_of(holding_bits({1}, {1}));
  const std::string whole = manifest.to_text();
  manifest.part = Manifest::Part{1, 3};
  const std::string text = manifest.to_text();
  EXPECT_EQ(parse_manifest(text, "m"), manifest);
  EXPECT_NE(parse_manifest(whole, "m"), manifest);
  EXPECT_THAT(text, ::testing::HasSubstr("\npart 1/3: " + manifest.whole_digest() + "\n"));
  manifest.part->files = manifest.whole_digest();
  const std::string of_files = manifest.to_text();
  EXPECT_THAT(of_files, ::testing::HasSubstr("\npart 1/3 " + manifest.whole_digest() + ": "));
  EXPECT_EQ(parse_manifest(of_files, "m"), manifest);
  for (const char* const part : {"part 3/3", "part -1/3", "part 1", "part 1/3x", "part 1/3 x"}) {
    std::string other = text;
    other.replace(other.find("part 1/3"), 8, part);
    EXPECT_THAT([&] { parse_manifest(other, "m"); }, ThrowsError(ErrorKind::corruption, "part I/N"))
        << part;
  }
}

TEST(ManifestTest, ShardingDoesNotMatter) {
  std::vector<std::uint32_t> bits(24);
  for (std::uint32_t i = 0; i < 24; ++i) bits[i] = 0x3F800000 + i;
  const Manifest whole = manifest_of(holding_bits(bits, {4, 6}));
  EXPECT_EQ(whole, manifest_of(holding_bits(bits, {4, 6},
                                            {{Box{{0, 0}, {4, 5}}, 0}, {Box{{0, 5}, {4, 1}}, 1}})));
  EXPECT_EQ(whole,
            manifest_of(holding_bits(bits, {4, 6}, {{FlatRange{0, 7}, 0}, {FlatRange{7, 24}, 1}})));
}

TEST(ManifestTest, ThreadsAndMemoryDoNotMatter) {
  std::vector<std::uint32_t> bits(100'000);
  for (std::uint32_t i = 0; i < bits.size(); ++i) bits[i] = i * 2654435761U;
  const auto checkpoint = holding_bits(bits, {100'000});
  const Selection all = select(checkpoint.contents(), NameSelection(), "memory");
  std::uint64_t nbytes_told = 0;
  const Manifest in_little_memory = compute_manifest(
      checkpoint, all,
      {.num_threads = 3, .memory_nbytes = 1000, .progress = [&](std::uint64_t nbytes) {
         nbytes_told += nbytes;
       }});
  EXPECT_EQ(in_little_memory, manifest_of(checkpoint));
  EXPECT_EQ(nbytes_told, manifest_nbytes(checkpoint.contents(), all));
}

TEST(ManifestTest, EachBitAndTheShapeAndTheDtypeMatter) {
  const auto digest = [](const MemoryCheckpoint& c) { return manifest_of(c).entries[0].digest; };
  const std::string quiet_nan = digest(holding_bits({0x7FC00000, 0}, {2}));
  EXPECT_NE(quiet_nan, digest(holding_bits({0x7FC00001, 0}, {2})));           // another payload
  EXPECT_NE(quiet_nan, digest(holding_bits({0x7FC00000, 0x80000000}, {2})));  // -0
  EXPECT_NE(quiet_nan, digest(holding_bits({0x7FC00000, 0}, {1, 2})));
  MemoryCheckpoint other_dtype;
  other_dtype.add({"t", DType::int32, {2}}, test::bytes_of<std::uint32_t>({0x7FC00000, 0}));
  EXPECT_NE(quiet_nan, digest(other_dtype));
  EXPECT_NE(digest(holding_bits({}, {0, 3})), digest(holding_bits({}, {3, 0})));
  EXPECT_NE(digest(holding_bits({1}, {})), digest(holding_bits({1}, {1})));
}

TEST(ManifestTest, AnAliasCountsAsWhatItNames) {
  MemoryCheckpoint tied;
  tied.add({"emb", DType::float32, {2}}, test::bytes_of<float>({1, 2}));
  tied.add_alias("head", "emb");
  MemoryCheckpoint untied;
  untied.add({"emb", DType::float32, {2}}, test::bytes_of<float>({1, 2}));
  untied.add({"head", DType::float32, {2}}, test::bytes_of<float>({1, 2}));
  EXPECT_EQ(manifest_of(tied), manifest_of(untied));

  Selection alias_alone;
  alias_alone.aliases = {0};
  EXPECT_EQ(compute_manifest(tied, alias_alone, {}).entries[0].digest,
            manifest_of(untied).entries[1].digest);
  EXPECT_EQ(manifest_nbytes(tied.contents(), alias_alone), 8U);

  tied.contents_for_change().aliases[0].target = "nothing";
  EXPECT_THAT([&] { manifest_of(tied); }, ThrowsError(ErrorKind::corruption, "head: alias"));
}

TEST(ManifestTest, ADamagedTensorIsAnError) {
  auto checkpoint = holding_bits({1, 2}, {2});
  checkpoint.fail_reads_of("t", 0);
  EXPECT_THAT([&] { manifest_of(checkpoint); }, ThrowsError(ErrorKind::corruption, "t"));
}

TEST(ManifestTest, TextReadsBackWhateverTheNames) {
  const std::string digest(32, 'a');
  Manifest manifest{{{"", digest},
                     {" a  b ", digest},
                     {"\\x0a", digest},
                     {"\n\x1b[31m", digest},
                     {"b\\", digest},
                     {"del\x7F\xE2\x80\xA8", digest},
                     {"name\xFF", digest},
                     {"whole: x", digest},
                     {std::string("nul\0", 4), digest},
                     {"été", digest}}};
  std::sort(manifest.entries.begin(), manifest.entries.end(),
            [](const auto& a, const auto& b) { return a.name < b.name; });
  const std::string text = manifest.to_text();
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 11);
  EXPECT_EQ(text.find('\x1b'), std::string::npos);
  EXPECT_NE(text.find("\\x7f\\xe2\\x80\\xa8"), std::string::npos);
  EXPECT_EQ(parse_manifest(text, "m"), manifest);
}

TEST(ManifestTest, WhatIsNoManifestIsRefusedWithItsLine) {
  const std::string digest(32, 'a');
  const auto refuses = [](const std::string& text, const std::string& found) {
    EXPECT_THAT([&] { parse_manifest(text, "m"); }, ThrowsError(ErrorKind::corruption, found));
  };
  refuses("", "m: manifest: expected lines");
  refuses(digest + "  a\n" + digest + " b\n", "m: line 2: expected DIGEST  NAME");
  refuses("0123\n", "line 1: expected DIGEST  NAME");
  refuses(std::string(32, 'G') + "  a\n", "line 1: expected 32 lower-case hex digits");
  refuses(digest + "  a\\n\n", "line 1: expected a name");
  refuses(digest + "  a\\x0\n", "line 1: expected a name");
  refuses(digest + "  a\n" + digest + "  a\n", "names: expected each name once, found 'a twice'");
  refuses(digest + "  a\n" + digest + "  b\n",
          "m: whole: expected the digest of all names, found none after 2 names");
  refuses("{\"digests\": [{\"name\": \"a\", \"digest\": \"" + digest + "\"}]}",
          "m: whole: expected the digest of all names, found none after 1 name");
  refuses("{\"digests\": [{\"name\": \"a\"}]}", "digest: expected a string");
  refuses("{}", "digests: expected a list");
  refuses("{", "m: ");
  std::string cut = Manifest{{{"a", digest}, {"b", digest}}}.to_text();
  cut.erase(0, cut.find('\n') + 1);
  refuses(cut, "edited or cut short?");
}

TEST(ManifestTest, LinesMayEndAsOtherSystemsEndThem) {
  Manifest manifest{{{"a", std::string(32, 'a')}, {"b\r", std::string(32, 'b')}}};
  std::string text;
  for (const char c : manifest.to_text()) {
    if (c == '\n') text += '\r';
    text += c;
  }
  EXPECT_EQ(parse_manifest(text, "m"), manifest);
  std::erase(text, '\n');
  EXPECT_THAT(
      [&] { parse_manifest(text, "m"); },
      ThrowsError(
          ErrorKind::corruption,
          "m: line 1: expected a line that ends with LF or CRLF, found only carriage returns"));
}

TEST(ManifestTest, TheBeginTellsWhatIsNone) {
  const std::string digest(32, 'a');
  for (const std::string& begin :
       {std::string(), digest + "  a", digest + "  \\", std::string("{\"schema\""),
        "whole: " + digest, digest + "  a\nno matter what"}) {
    EXPECT_NO_THROW(check_manifest_begin(begin, "m")) << begin;
  }
  for (const std::string& begin : {std::string(4096, '\0'), std::string("y\ny\n"), digest + " a",
                                   std::string(32, 'g') + "  a", std::string(4096, 'a')}) {
    EXPECT_THAT([&] { check_manifest_begin(begin, "m"); },
                ThrowsError(ErrorKind::corruption, "m: line 1: expected"));
  }
}

TEST(ManifestTest, DifferencesAreNamed) {
  const std::string one(32, '1');
  const std::string two(32, '2');
  const Manifest expected{{{"a", one}, {"b", one}, {"c", one}, {"e", one}}};
  const Manifest found{{{"b", one}, {"c", two}, {"d", one}, {"e", one}, {"f", two}}};
  EXPECT_THAT(compare(expected, found),
              ElementsAre(ManifestDifference{ChangeKind::missing, "a", one, {}},
                          ManifestDifference{ChangeKind::changed, "c", one, two},
                          ManifestDifference{ChangeKind::extra, "d", {}, one},
                          ManifestDifference{ChangeKind::extra, "f", {}, two}));
  EXPECT_THAT(compare(found, found), IsEmpty());
  EXPECT_EQ(compare(Manifest{}, found).size(), 5U);
}

TEST(ManifestTest, ExtraFilesAreNoPartOfTheWhole) {
  const std::string digest(32, 'a');
  const Manifest plain{{{"a", digest}}};
  const Manifest manifest{{{"a", digest}}, {{"config.json", digest}, {"odd\n", digest}}};
  EXPECT_EQ(manifest.whole_digest(), plain.whole_digest());
  EXPECT_EQ(parse_manifest(manifest.to_text(), "m"), manifest);
  EXPECT_THAT(manifest.to_text(), ::testing::EndsWith(plain.to_text()));
  EXPECT_NO_THROW(check_manifest_begin(manifest.to_text(), "m"));
}

TEST(ManifestTest, AListOfExtraFilesThatWasCutIsRefused) {
  const std::string digest(32, 'a');
  const Manifest manifest{{{"a", digest}}, {{"b", digest}, {"c", digest}}};
  const std::string text = manifest.to_text();
  std::vector<std::size_t> line_begins{0};
  while (text.find('\n', line_begins.back()) + 1 < text.size()) {
    line_begins.push_back(text.find('\n', line_begins.back()) + 1);
  }
  ASSERT_EQ(line_begins.size(), 5U);  // two files, their digest, a name, the whole
  for (const std::size_t begin : line_begins) {
    std::string cut = text;
    cut.erase(begin, cut.find('\n', begin) + 1 - begin);
    EXPECT_THAT([&] { parse_manifest(cut, "m"); },
                ThrowsError(ErrorKind::corruption, "edited or cut short?"));
  }
}

TEST(ManifestTest, AManifestWithoutExtraFilesAsksForNone) {
  const std::string one(32, '1');
  const std::string two(32, '2');
  const Manifest older{{{"a", one}}};
  const Manifest expected{{{"a", one}}, {{"b", one}, {"c", one}}};
  const Manifest found{{{"a", one}}, {{"c", two}, {"d", one}}};
  EXPECT_THAT(compare(older, found), IsEmpty());
  EXPECT_THAT(compare(expected, found),
              ElementsAre(ManifestDifference{ChangeKind::missing, "b", one, {}, true},
                          ManifestDifference{ChangeKind::changed, "c", one, two, true},
                          ManifestDifference{ChangeKind::extra, "d", {}, one, true}));
}

}  // namespace
}  // namespace tessera::inspect
