#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "formats/pickle/foreign_object.h"
#include "formats/pickle/plain_value.h"
#include "formats/pickle/unpickler.h"

// Shows E3. Nothing from a file is executed; pickles go through a closed allow-list.
namespace tessera::formats::pickle {
namespace {

using std::string_literals::operator""s;
using testing::HasSubstr;
using testing::Not;

const AllowList& plain() {
  static const AllowList allowed{value_globals()};
  return allowed;
}

ObjectGraph read(std::string_view pickle, const AllowList& allowed = plain(),
                 PickleLimits limits = {}) {
  return unpickle({pickle.begin(), pickle.end()}, {.path = "x.pkl"}, allowed, {}, limits);
}

std::string json_of(std::string_view pickle) {
  const ObjectGraph graph = read(pickle);
  WalkBudget budget(graph);
  return value_to_json(to_value(graph.root(), budget));
}

template <class Action>
Error error_of(const Action& action) {
  try {
    action();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "nothing was thrown";
  return Error(ErrorKind::io, {}, "");
}

Error refusal_of(std::string_view pickle) {
  return error_of([&] { read(pickle); });
}

Error value_refusal_of(std::string_view pickle) {
  return error_of([&] { json_of(pickle); });
}

std::string u32(std::uint32_t value) {
  std::string bytes;
  for (int i = 0; i < 4; ++i) bytes += static_cast<char>(value >> (8 * i));
  return bytes;
}

std::string unicode(std::string_view text) {
  return "X" + u32(static_cast<std::uint32_t>(text.size())) + std::string(text);
}

TEST(PickleTest, ReadsEveryPlainOpcode) {
  const std::pair<std::string, std::string> cases[] = {
      {"N."s, "null"},
      {"\x88."s, "true"},
      {"\x89."s, "false"},
      {"I01\n."s, "true"},
      {"I00\n."s, "false"},
      {"I-12\n."s, "-12"},
      {"L77L\n."s, "77"},
      {"L-0L\n."s, "0"},
      {"L000000000000000000000000012L\n."s, "12"},
      {"L1606938044258990275541962092341162602522202993782792835301377L\n."s,
       "1606938044258990275541962092341162602522202993782792835301377"},
      {"F2.5\n."s, "2.5"},
      {"K\xff."s, "255"},
      {"M\xff\xff."s, "65535"},
      {"J\xff\xff\xff\xff."s, "-1"},
      {"J\x00\x00\x00\x80."s, "-2147483648"},
      {"\x8a\x00."s, "0"},
      {"\x8a\x01\xff."s, "-1"},
      {"\x8a\x02\x00\x80."s, "-32768"},
      {"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f."s, "9223372036854775807"},
      {"\x8a\x08\x00\x00\x00\x00\x00\x00\x00\x80."s, "-9223372036854775808"},
      {"\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x80\x00."s, "9223372036854775808"},
      {"\x8a\x09\xff\xff\xff\xff\xff\xff\xff\xff\x00."s, "18446744073709551615"},
      {"\x8a\x09\xff\xff\xff\xff\xff\xff\xff\x7f\xff."s, "-9223372036854775809"},
      {"\x8b\x01\x00\x00\x00\x07."s, "7"},
      {"G\x3f\xf8\x00\x00\x00\x00\x00\x00."s, "1.5"},
      {unicode("a\xc3\xa9") + ".", "\"a\xc3\xa9\""},
      {"\x8c\x02xy."s, "\"xy\""},
      {"\x8d\x02\x00\x00\x00\x00\x00\x00\x00xy."s, "\"xy\""},
      {"Va\\u00e9\xe9\n."s, "\"a\xc3\xa9\xc3\xa9\""},
      {"V\\\\u0041\n."s, R"("\\\\u0041")"},  // no escape behind a backslash that is text
      {"V\\\\\\u0041\n."s, R"("\\\\A")"},
      {unicode("\xed\xa0\x80") + ".", R"({"$str":"7aCA"})"},  // a lone surrogate
      {"V\\ud800\n."s, R"({"$str":"7aCA"})"},
      {"U\x03\xed\xa0\x80."s, R"({"$bytes":"7aCA"})"},  // in Python 2 this is bytes
      {"S'it\\'s\\x41\\n'\n."s,
       "\"it's"
       "A\\n\""},
      {"U\x02xy."s, "\"xy\""},
      {"U\x01\xff."s, R"({"$bytes":"/w=="})"},
      {"T\x02\x00\x00\x00xy."s, "\"xy\""},
      {"C\x02\x00\xff."s, R"({"$bytes":"AP8="})"},
      {"B\x01\x00\x00\x00z."s, R"({"$bytes":"eg=="})"},
      {"\x8e\x01\x00\x00\x00\x00\x00\x00\x00z."s, R"({"$bytes":"eg=="})"},
      {"\x96\x01\x00\x00\x00\x00\x00\x00\x00z."s, R"({"$bytes":"eg=="})"},
      {"]."s, "[]"},
      {"(K\x01K\x02l."s, "[1,2]"},
      {"](K\x01K\x02"
       "eK\x03"
       "a."s,
       "[1,2,3]"},
      {")."s, R"({"$tuple":[]})"},
      {"K\x01\x85."s, R"({"$tuple":[1]})"},
      {"K\x01K\x02\x86."s, R"({"$tuple":[1,2]})"},
      {"K\x01K\x02K\x03\x87."s, R"({"$tuple":[1,2,3]})"},
      {"(K\x01K\x02K\x03K\x04t."s, R"({"$tuple":[1,2,3,4]})"},
      {"}."s, "{}"},
      {"}U\x01"
       "aK\x01s."s,
       R"({"a":1})"},
      {"}(U\x01"
       "aK\x01U\x01"
       "bNu."s,
       R"({"a":1,"b":null})"},
      {"(U\x01"
       "aK\x01"
       "d."s,
       R"({"a":1})"},
      {"\x8f(K\x01K\x02\x90."s, R"({"$set":[1,2]})"},
      {"(K\x01\x91."s, R"({"$set":[1]})"},
      {"K\x01(K\x02\x31."s, "1"},  // POP_MARK
      {"K\x01K\x02\x30."s, "1"},   // POP
      {"K\x01(0."s, "1"},          // POP takes off a MARK
      {"](K\x01"
       "2e."s,
       "[1,1]"},  // DUP
      {"\x80\x04\x95\x03\x00\x00\x00\x00\x00\x00\x00K\x05."s, "5"},
      {"]q\x00h\x00"s
       "a."s,
       "loop"},
  };
  for (const auto& [pickle, json] : cases) {
    SCOPED_TRACE(testing::PrintToString(pickle));
    if (json == "loop") {
      EXPECT_THAT(value_refusal_of(pickle).what(), HasSubstr("contains itself"));
    } else {
      EXPECT_EQ(json_of(pickle), json);
    }
  }
}

TEST(PickleTest, MemoKeepsOneObjectForEveryReference) {
  const ObjectGraph graph = read(
      "](]q\x05h\x05r\x07\x00\x00\x00j\x07\x00\x00\x00"s
      "e.");
  const Object list = graph.root();
  ASSERT_EQ(list.num_items("list"), 3u);
  EXPECT_EQ(list.item(0), list.item(1));
  EXPECT_EQ(list.item(0), list.item(2));
}

TEST(PickleTest, MemoizeNumbersSlotsInOrder) {
  EXPECT_EQ(json_of("](K\x07\x94K\x08\x94h\x00h\x01"s
                    "e."),
            "[7,8,7,8]");
}

TEST(PickleTest, LaterEntryReplacesAnEqualKey) {
  EXPECT_EQ(json_of("}(U\x01"
                    "aK\x01U\x01"
                    "bK\x02U\x01"
                    "aK\x03u."),
            R"({"a":3,"b":2})");
  // 1 == True == 1.0 in Python
  EXPECT_EQ(json_of("}(K\x01U\x01x\x88U\x01yG\x3f\xf0\x00\x00\x00\x00\x00\x00U\x01zu."s),
            R"({"$dict":[[1,"z"]]})");
  // str and bytes differ; NaN equals nothing
  const std::string nan = "G\x7f\xf8\x00\x00\x00\x00\x00\x00"s;
  const ObjectGraph graph = read(
      "}(U\x01"
      "aNC\x01"
      "aN" +
      nan + "N" + nan + "Nu.");
  EXPECT_EQ(graph.root().num_entries("dict"), 4u);
  EXPECT_EQ(json_of("}(K\x01K\x02\x86U\x01xK\x01K\x02\x86U\x01yu."),
            R"({"$dict":[[{"$tuple":[1,2]},"y"]]})");
}

TEST(PickleTest, RepeatedKeysCostLittle) {
  std::string pickle = "}(";
  for (int i = 0; i < 300000; ++i) pickle += "K"s + static_cast<char>(i % 200) + "N";
  const ObjectGraph graph = read(pickle + "u.");
  EXPECT_EQ(graph.root().num_entries("dict"), 200u);
}

TEST(PickleTest, ForeignGlobalsAreRefusedByName) {
  const std::string attacks[] = {
      "cos\nsystem\n(U\x02idtR."s,
      "cbuiltins\neval\n(U\x03"
      "1+1tR."s,
      "c__builtin__\nexec\n."s,
      "\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x02id\x85R."s,
      "ccollections\nOrderedDict.__init__\n."s,
      "ccollections\nnamedtuple\n."s,
      "ctorch.storage\n_load_from_bytes\n."s,
      "ctorch.hub\nload\n."s,
      "c\n\n."s,
      "cos\nOrderedDict\n."s,
  };
  for (const std::string& attack : attacks) {
    SCOPED_TRACE(testing::PrintToString(attack));
    const Error error = refusal_of(attack);
    EXPECT_EQ(error.kind(), ErrorKind::unsupported);
    EXPECT_THAT(error.what(), HasSubstr("not in the allow-list; nothing was executed"));
    EXPECT_THAT(error.what(), HasSubstr("x.pkl"));
  }
  EXPECT_THAT(refusal_of(attacks[0]).what(), HasSubstr("foreign global os.system"));
  EXPECT_THAT(refusal_of("ctorch.nn.modules.linear\nLinear\n.").what(), HasSubstr("state_dict()"));
}

/// Reads a pickle whose foreign globals are recorded.
ObjectGraph record(std::string_view pickle, std::span<const std::string> as_dict = {}) {
  return unpickle({pickle.begin(), pickle.end()}, {.path = "x.pkl"}, plain(),
                  {.policy = ForeignGlobals::Policy::record, .as_dict = as_dict});
}

std::string words_for(std::string_view pickle) {
  const ObjectGraph graph = record(pickle);
  EXPECT_TRUE(is_foreign(graph.root()));
  WalkBudget budget(graph);
  const Error error = error_of([&] { to_value(graph.root(), budget); });
  EXPECT_EQ(error.kind(), ErrorKind::unsupported);
  EXPECT_THAT(error.what(), HasSubstr("nothing was executed"));
  return foreign_in_words(graph.root());
}

TEST(PickleTest, RecordedForeignObjectsHaveTheirNames) {
  const std::pair<std::string, std::string> cases[] = {
      {"cos\nsystem\n."s, "class or function os.system"},
      {"cos\nsystem\n(U\x02idtR."s, "call of os.system"},
      {"c__builtin__\neval\n(U\x03"
       "1+1tR."s,
       "call of builtins.eval"},
      {"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x02id\x85R."s, "call of posix.system"},
      {"cargparse\nNamespace\n)\x81}U\x01"
       "aK\x01sb."s,
       "object of class argparse.Namespace"},
      {"ca\nB\n)}\x92."s, "object of class a.B"},
      {"(ca\nB\nK\x01o."s, "object of class a.B"},
      {"(K\x01ia\nB\n."s, "object of class a.B"},
      {"ccopy_reg\n_reconstructor\n(ca\nB\nc__builtin__\nobject\nNtR}b."s, "object of class a.B"},
      {"ca\nf\n)R)R)R."s, "call of a.f"},  // what a call returned is called
      {"ccollections\nOrderedDict\n)R)R."s, "call of collections.OrderedDict"},
      {"ccollections\nOrderedDict\n)}\x92."s, "object of class collections.OrderedDict"},
      {"ca\nB\n)\x81K\1aK\2K\3s."s, "object of class a.B"},  // items and entries
      {"c\x1b[2J\nB\n."s, "class or function \\x1b[2J.B"},
  };
  for (const auto& [pickle, words] : cases) {
    SCOPED_TRACE(testing::PrintToString(pickle));
    EXPECT_EQ(words_for(pickle), words);
  }
}

TEST(PickleTest, RecordingStillRefusesWhatIsNoObject) {
  for (const char opcode : {'\x82', '\x83', '\x84', '\x97', '\x98'}) {
    EXPECT_EQ(error_of([&] { record("("s + opcode + "cos\nsystem\n."); }).kind(),
              ErrorKind::unsupported);
  }
  for (const std::string& broken : {"K\x01)R."s, "U\x01x)}\x92."s, "(o."s, "ca\nB\nK\x01R."s,
                                    "ia\nB\n."s, "}}b."s, "ca\nB\n)\x92."s, "(K\x01o."s}) {
    SCOPED_TRACE(testing::PrintToString(broken));
    EXPECT_EQ(error_of([&] { record(broken); }).kind(), ErrorKind::corruption);
  }
}

TEST(PickleTest, ForeignNamesAreListedWithoutBeingUsed) {
  const ObjectGraph graph =
      record("cos\nsystem\n0ca\nB\n)R0ca\nB\n0ccollections\nOrderedDict\n0N.");
  EXPECT_EQ(foreign_names(graph, 100), (std::vector<std::string>{"a.B", "os.system"}));
  EXPECT_EQ(foreign_names(graph, 1).size(), 1u);
}

TEST(PickleTest, ObjectsOfNamedClassesBecomeDicts) {
  const std::string classes[] = {"a.b.C"};
  const auto read_as_dict = [&](const std::string& pickle) {
    const ObjectGraph graph = record(pickle, classes);
    WalkBudget budget(graph);
    std::string text = value_to_json(to_value(graph.root(), budget));
    return text + " " + std::to_string(budget.as_dicts().size());
  };
  const std::string object = "ca.b\nC\n)\x81";
  EXPECT_EQ(read_as_dict(object + "}U\x01xK\x01sb."), R"({"x":1} 1)");
  EXPECT_EQ(read_as_dict(object + "."), "{} 1");
  EXPECT_EQ(read_as_dict(object + "Nb."), "{} 1");
  EXPECT_EQ(read_as_dict(object + "U\x01xK\x01s."), R"({"x":1} 1)");  // derived from dict
  EXPECT_EQ(read_as_dict("](" + object + "}U\x01x" + object + "sbe."), R"([{"x":{}}] 2)");
  const std::string others[] = {
      "ca\nb.D\n)\x81}b.",                     // another class
      "ca.b\nC\n.",                            // the class itself
      "ca.b\nC\nK\x01\x85\x81}b.",             // made of arguments
      object + "K\x01\x85" + "b.",             // its state is a tuple
      object + "}b}b.",                        // two states
      object + "U\x01xK\x01s}U\x01yK\x02sb.",  // entries and a state
      object + "K\x01" + "a.",                 // items
      object + "q\1}U\x01xh\1sb.",             // refers back to itself
  };
  for (const std::string& pickle : others) {
    SCOPED_TRACE(testing::PrintToString(pickle));
    EXPECT_EQ(error_of([&] { read_as_dict(pickle); }).kind(), ErrorKind::unsupported);
  }
}

bool is_integer(Object object) {
  return object.is(ObjectKind::integer);
}

TEST(PickleTest, HeldObjectsAreCountedOnce) {
  const auto count = [](const std::string& pickle) {
    const ObjectGraph graph = record(pickle);
    HeldObjects held(graph, is_integer);
    const std::size_t num_found = held.count(graph.root());
    EXPECT_EQ(held.count(graph.root()), num_found);
    return num_found;
  };
  EXPECT_EQ(count("ca\nB\nK\x07\x85R}(U\x01xK\x01K\x02Nub."), 3u);
  EXPECT_EQ(count("ca\nB\n)R(K\x01K\x02"
                  "eK\x03K\x04s."),
            4u);
  EXPECT_EQ(count("ca\nB\n)Rq\0}(U\x01xh\0U\x01yK\x01q\1U\x01zh\1ub."s), 1u);  // a cycle
  EXPECT_EQ(
      count("ca\nB\n)R" + std::string(100000, ']') + "K\x01" + std::string(100000, 'a') + "b."),
      1u);
}

/// Returns a list of 10^5 objects that share one state of 10^5 entries.
ObjectGraph objects_with_one_state() {
  std::string pickle = "]q\0("s + std::string(100000, 'N') + "e0](";
  for (int i = 0; i < 100000; ++i) pickle += "ca\nB\nh\0\x85R"s;
  return record(pickle + "e.");
}

// Counting the entries of each object would be slow.
TEST(PickleTest, CountsOfSharedPartsCostLittle) {
  const ObjectGraph graph = objects_with_one_state();
  HeldObjects held(graph, is_integer);
  std::size_t num_found = 0;
  for (std::size_t i = 0; i < graph.root().num_items("root"); ++i) {
    num_found += held.count(graph.root().item(i));
  }
  EXPECT_EQ(num_found, 0u);
}

TEST(PickleTest, ASearchForHeldObjectsRemembersWhatHoldsNone) {
  // [[None, ...], (the list before,), 7, [itself, 7], [itself, None]]
  const ObjectGraph graph = record("](](NNeq\1h\1\x85K\7]q\2(h\2K\7e]q\3(h\3Nee."s);
  HeldObjects held(graph, is_integer);
  const Object root = graph.root();
  for (int round = 0; round < 2; ++round) {
    const std::vector<bool> expected{false, false, true, true, false};
    ASSERT_EQ(root.num_items("root"), expected.size());
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_EQ(held.is_or_holds(root.item(i)), expected[i]) << i;
    }
    EXPECT_TRUE(held.is_or_holds(root));
  }
}

// The shared state is searched once.
TEST(PickleTest, SearchesOfSharedPartsDoNotRunOut) {
  const ObjectGraph graph = objects_with_one_state();
  HeldObjects held(graph, is_integer);
  std::size_t num_found = 0;
  for (std::size_t i = 0; i < graph.root().num_items("root"); ++i) {
    num_found += held.is_or_holds(graph.root().item(i)) ? 1U : 0U;
  }
  EXPECT_EQ(num_found, 0u);
}

TEST(PickleTest, NumpyArraysAreNamedByTheirShape) {
  const std::string array =
      "cnumpy._core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\0\x85U\1btR(K\1K\2K\3\x86"
      "cnumpy\ndtype\nU\2f4\x89\x88\x87R\x89U\0tb."s;
  EXPECT_EQ(words_for(array), "NumPy array float32 [2, 3]");
  EXPECT_EQ(words_for("cnumpy._core.multiarray\n_reconstruct\n)R."s),
            "call of numpy._core.multiarray._reconstruct");
}

// NumPy's random generator keeps its state in such an array.
TEST(PickleTest, ShortNumpyArraysOfUnsignedIntegersBecomeLists) {
  const auto array = [](const std::string& sizes, const std::string& dtype,
                        const std::string& bytes) {
    return "cnumpy._core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\0\x85U\1btR(K\1("s + sizes +
           "tcnumpy\ndtype\nU\2" + dtype.substr(1) + "\x89\x88\x87R(K\3U\1" + dtype[0] +
           "NNNNNNtb\x89"
           "C" +
           static_cast<char>(bytes.size()) + bytes + "tb.";
  };
  const auto json_of_array = [&](const std::string& sizes, const std::string& bytes,
                                 const std::string& dtype = "<u4") {
    const ObjectGraph graph = record(array(sizes, dtype, bytes));
    WalkBudget budget(graph);
    return value_to_json(to_value(graph.root(), budget));
  };
  const std::string two = "\1\0\0\0\xfe\xff\xff\xff"s;
  EXPECT_EQ(json_of_array("K\2", two), "[1,4294967294]");
  EXPECT_EQ(json_of_array("K\0"s, ""), "[]");
  EXPECT_EQ(json_of_array("K\2", two + "\1\0\0\0\0\0\0\0"s, "<u8"),
            "[18446744065119617025,1]");  // of Philox and SFC64
  EXPECT_THAT(error_of([&] { json_of_array("K\3", two); }).what(), HasSubstr("expected 12 bytes"));

  EXPECT_EQ(words_for(array("K\2", ">u4", two)), "NumPy array uint32 [2]");
  EXPECT_EQ(words_for(array("K\2", "<i4", two)), "NumPy array int32 [2]");
  EXPECT_EQ(words_for(array("K\1K\2", "<u4", two)), "NumPy array uint32 [1, 2]");
  EXPECT_EQ(words_for(array("J\xff\xff\xff\xff", "<u4", "")), "NumPy array uint32 [-1]");
  EXPECT_EQ(words_for(array("M\1\4", "<u4", two)), "NumPy array uint32 [1025]");
}

// What `pickle.dumps(array, 5)` writes: a bytearray, or bytes for an array that is read-only.
TEST(PickleTest, NumpyArraysOfProtocol5AreReadLikeOthers) {
  const auto array = [](const std::string& buffer, const std::string& sizes,
                        const std::string& dtype, const std::string& package = "numpy._core") {
    return "c"s + package + ".numeric\n_frombuffer\n(" + buffer + "cnumpy\ndtype\nU\2" +
           dtype.substr(1) + "\x89\x88\x87R(K\3U\1" + dtype[0] + "NNNNNNtb(" + sizes + "tU\1CtR.";
  };
  const auto read = [&](const std::string& pickle, std::set<std::string_view> plainer) {
    const ObjectGraph graph = record(pickle);
    WalkBudget budget(graph);
    std::string json = value_to_json(to_value(graph.root(), budget));
    EXPECT_EQ(budget.take_plainer(), plainer);
    return json;
  };
  const std::string two = "\1\0\0\0\xfe\xff\xff\xff"s;
  const std::string byte_array = "\x96\x08\0\0\0\0\0\0\0"s + two;
  const std::set<std::string_view> noted{"NumPy array"};
  EXPECT_EQ(read(array(byte_array, "K\2", "<u4"), noted), "[1,4294967294]");
  EXPECT_EQ(read(array("C\x08" + two, "K\2", "<u4", "numpy.core"), noted), "[1,4294967294]");
  EXPECT_THAT(error_of([&] { read(array(byte_array, "K\3", "<u4"), {}); }).what(),
              HasSubstr("expected 12 bytes"));
  EXPECT_THAT(error_of([&] { read(array("N", "K\3", "<u4"), {}); }).what(),
              HasSubstr("expected 12 bytes"));

  EXPECT_EQ(words_for(array(byte_array, "K\2", ">u4")), "NumPy array uint32 [2]");
  EXPECT_EQ(words_for(array(byte_array, "K\1K\2", "<f4")), "NumPy array float32 [1, 2]");
  EXPECT_EQ(words_for("cnumpy._core.numeric\n_frombuffer\n)R."s),
            "call of numpy._core.numeric._frombuffer");
}

TEST(PickleTest, BytesInMemoryBecomeBytes) {
  const auto json_of_recorded = [](const std::string& pickle) {
    const ObjectGraph graph = record(pickle);
    WalkBudget budget(graph);
    return value_to_json(to_value(graph.root(), budget));
  };
  const std::string object = "c_io\nBytesIO\n)\x81";
  EXPECT_EQ(json_of_recorded(object + "C\x02"
                                      "abK\0N\x87"
                                      "b."s),
            R"({"$bytes":"YWI="})");
  EXPECT_EQ(json_of_recorded(object + "."), R"({"$bytes":""})");
  EXPECT_THROW(json_of_recorded(object + "K\x01\x85"
                                         "b."),
               Error);
}

TEST(PickleTest, AllowListMatchesWholeNamesAndWholeModules) {
  static constexpr AllowedGlobal kTable[] = {{"a.b", "c", 0x300}, {"mod", "*", 0x301}};
  const AllowList allowed{kTable};
  EXPECT_EQ(allowed.find("a.b", "c"), 0x300u);
  EXPECT_EQ(allowed.find("a", "b.c"), std::nullopt);
  EXPECT_EQ(allowed.find("mod", "x"), 0x301u);
  EXPECT_EQ(allowed.find("mod.sub", "x"), 0x301u);
  EXPECT_EQ(allowed.find("module", "x"), std::nullopt);
}

TEST(PickleTest, OpcodesThatReachOutsideAreRefused) {
  for (const char opcode : {'i', 'o', '\x82', '\x83', '\x84', '\x92', '\x97', '\x98'}) {
    SCOPED_TRACE(static_cast<int>(static_cast<unsigned char>(opcode)));
    const Error error = refusal_of("("s + opcode + "cos\nsystem\n.");
    EXPECT_EQ(error.kind(), ErrorKind::unsupported);
    EXPECT_THAT(error.what(), HasSubstr("nothing was executed"));
  }
}

TEST(PickleTest, BrokenProgramsAreCorruptionAtAByte) {
  const std::pair<std::string, std::string> cases[] = {
      {""s, "opcode: expected 1 bytes, found 0"},
      {"."s, "stack: expected an object, found none"},
      {"K\x01"s, "opcode"},
      {"K"s, "integer: expected 1 bytes, found 0"},
      {"K\x01."s + "x", "bytes after STOP: expected 0, found 1"},
      {"K\x01K\x02."s, "stack at STOP: expected one object, found 2"},
      {"(K\x01."s, "stack at STOP"},
      {"h\x07."s, "memo slot: expected a slot that was set, found slot 7 unset"},
      {"j\xff\xff\xff\xff."s, "memo slot"},
      {"Nr\xff\xff\xff\x7f."s, "memo slot: expected below"},
      {"g12x\n."s, "memo slot: expected decimal digits"},
      {"q\x00."s, "stack"},
      {"t."s, "expected a MARK"},
      {"l."s, "expected a MARK"},
      {"e."s, "expected a MARK"},
      {"u."s, "expected a MARK"},
      {"1."s, "expected a MARK"},
      {"(e."s, "below the MARK"},
      {"(u."s, "below the MARK"},
      {"]((e."s, "below the MARK"},
      {"](K\x01s."s, "stack"},
      {"}(K\x01u."s, "odd number"},
      {"(K\x01"
       "d."s,
       "odd number"},
      {"K\x01K\x02"
       "a."s,
       "append target: expected list, found int 1"},
      {"](K\x01\x90."s, "append target: expected set, found list"},
      {"K\x01(NNu."s, "set-items target: expected dict, found int 1"},
      {"N}b."s, "BUILD target: expected object, found None"},
      {"K\x01)R."s, "REDUCE callable: expected global, found int 1"},
      {"ccollections\nOrderedDict\n]R."s, "REDUCE arguments: expected tuple, found list of 0"},
      {"ccollections\nOrderedDict\nN\x81."s, "NEWOBJ arguments: expected tuple"},
      {"K\x01K\x02\x93."s, "STACK_GLOBAL: expected two str"},
      {"K\x01\x87."s, "stack: expected 3 objects, found 1"},
      {"X\xff\xff\xff\xff"
       "abc."s,
       "str: expected 4294967295 bytes, found 4"},
      {"\x8d\xff\xff\xff\xff\xff\xff\xff\xff"
       "abc."s,
       "str: expected 18446744073709551615 bytes"},
      {"\x95\xff\xff\xff\xff\xff\xff\xff\x7fN."s, "frame"},
      {"U\x05"
       "abc"s,
       "string: expected 5 bytes, found 3"},
      {"X\x02\x00\x00\x00\xc3\x28."s, "UTF-8"},
      {unicode("\xed\xa0") + ".", "UTF-8"},  // a surrogate cut short
      {unicode("\xed\xc0\x80") + ".", "UTF-8"},
      {"Ixyz\n."s, "integer: expected decimal digits"},
      {"L12"s, "end of line"},
      {"Fx\n."s, "float: expected a number"},
      {"Sabc\n."s, "quotes"},
      {"S'\\q'\n."s, "escapes"},
      {"V\\u12\n."s, "escapes"},
      {"\xff."s, "opcode: expected a pickle opcode, found byte 255"},
      {"\x80\x06N."s, "pickle protocol: expected at most 5, found 6"},
  };
  for (const auto& [pickle, what] : cases) {
    SCOPED_TRACE(testing::PrintToString(pickle));
    const Error error = refusal_of(pickle);
    EXPECT_THAT(error.what(), HasSubstr(what));
    EXPECT_EQ(error.where().path, "x.pkl");
    EXPECT_TRUE(error.where().byte_range.has_value());
  }
}

TEST(PickleTest, EveryTruncationIsAnError) {
  const std::string whole =
      "\x80\x02}q\x00(X\x01\x00\x00\x00wq\x01"s
      "ccollections\nOrderedDict\nq\x02)R(X\x01\x00\x00\x00kM\x01\x02uG\x3f\xf0\x00\x00\x00\x00\x00\x00\x8a\x02\x01\x02u."s;
  EXPECT_EQ(json_of(whole), R"({"$dict":[["w",{"k":513}],[1.0,513]]})");
  for (std::size_t nbytes = 0; nbytes < whole.size(); ++nbytes) {
    SCOPED_TRACE(nbytes);
    EXPECT_EQ(refusal_of(whole.substr(0, nbytes)).kind(), ErrorKind::corruption);
  }
}

TEST(PickleTest, DamagedBytesNeverCrash) {
  const std::string whole =
      "\x80\x02}q\x00(X\x01\x00\x00\x00wq\x01"s
      "ccollections\nOrderedDict\nq\x02)R("
      "X\x01\x00\x00\x00kM\x01\x02uX\x01\x00\x00\x00vq\x03](K\x01h\x01h\x03"s
      "e"
      "\x8f(K\x02\x90\x86u."s;
  std::mt19937 random(7);
  for (int round = 0; round < 20000; ++round) {
    std::string damaged = whole;
    for (int k = 0; k < 1 + round % 3; ++k) {
      damaged[random() % damaged.size()] = static_cast<char>(random());
    }
    try {
      json_of(damaged);
    } catch (const Error&) {
    }
  }
}

// 60 lists, each of which holds the list before it twice: 2^60 leaves in 400 bytes.
TEST(PickleTest, DoublingBombIsReadButNotUnfolded) {
  std::string pickle = "]q\x00"s;
  for (int i = 0; i < 60; ++i) {
    pickle += "](h"s + static_cast<char>(i) + "h" + static_cast<char>(i) + "eq" +
              static_cast<char>(i + 1);
  }
  pickle = "(" + pickle + "l.";
  const ObjectGraph graph = read(pickle);
  EXPECT_LT(graph.num_objects(), 100u);
  EXPECT_THAT(value_refusal_of(pickle).what(), HasSubstr("far more"));
}

TEST(PickleTest, SharedLongStringIsCounted) {
  std::string pickle = "](" + unicode(std::string(1 << 20, 'x')) + "q\x00"s;
  for (int i = 0; i < 2000; ++i) pickle += "h"s + '\0';
  EXPECT_THAT(value_refusal_of(pickle + "e.").what(), HasSubstr("far more"));
}

TEST(PickleTest, DepthIsBounded) {
  const auto nested = [](int depth) {
    return std::string(static_cast<std::size_t>(depth), ']') +
           std::string(static_cast<std::size_t>(depth - 1), 'a') + ".";
  };
  EXPECT_NO_THROW(json_of(nested(WalkBudget::kMaxDepth)));
  EXPECT_THAT(value_refusal_of(nested(WalkBudget::kMaxDepth + 1)).what(), HasSubstr("value depth"));
  EXPECT_NO_THROW(read(nested(1000000)));
}

TEST(PickleTest, SelfReferencesAreRefusedAsValues) {
  const std::string loops[] = {
      "]q\x00h\x00"s
      "a."s,
      "}q\x00(K\x01h\x00u."s,
      "]q\x00\x85"s
      "0h\x00h\x00\x85"s
      "a."s,
      "ccollections\nOrderedDict\n)Rq\x00(K\x01h\x00u."s,
  };
  for (const std::string& loop : loops) {
    SCOPED_TRACE(testing::PrintToString(loop));
    EXPECT_EQ(value_refusal_of(loop).kind(), ErrorKind::corruption);
    EXPECT_THAT(value_refusal_of(loop).what(), HasSubstr("contains itself"));
  }
}

TEST(PickleTest, LimitsHold) {
  EXPECT_THAT(error_of([] { read("]]]]0000.", plain(), {.max_objects = 3}); }).what(),
              HasSubstr("objects in one pickle: expected at most 3"));
  EXPECT_THAT(error_of([] { read("N.", plain(), {.max_nbytes = 1}); }).what(),
              HasSubstr("pickle size: expected at most 1 bytes, found 2"));
  EXPECT_THAT(refusal_of("\x8b\x01\x01\x00\x00"s + std::string(257, '\1') + ".").what(),
              HasSubstr("integer size: expected at most 256 bytes, found 257"));
  EXPECT_THAT(refusal_of("\x8b\xff\xff\xff\xff.").what(), HasSubstr("integer size"));
  EXPECT_THAT(refusal_of("L" + std::string(100000, '9') + "L\n.").what(),
              HasSubstr("integer size"));
}

TEST(PickleTest, TorchAndPythonTypesBecomeValues) {
  const std::pair<std::string, std::string> cases[] = {
      {"ctorch\nSize\n(K\x03K\x00t\x85R."s, R"({"$tuple":[3,0]})"},
      {"ctorch\nbfloat16\n."s, R"({"$symbol":"torch.bfloat16"})"},
      {"ctorch\ndevice\nU\x04"
       "cudaK\x03\x86R."s,
       R"({"$symbol":"device:cuda:3"})"},
      {"ctorch\ndevice\nU\x03"
       "cpu\x85R."s,
       R"({"$symbol":"device:cpu"})"},
      {"ctorch.serialization\n_get_layout\nU\x0dtorch.strided\x85R."s,
       R"({"$symbol":"torch.strided"})"},
      {"ccollections\nOrderedDict\n)R(U\x01zK\x01U\x01"
       "aK\x02u}(U\x09_metadataNub."s,
       R"({"z":1,"a":2})"},
      {"ccollections\nOrderedDict\n](](U\x01zK\x01"
       "e](U\x01"
       "aK\x02"
       "e](U\x01zK\x03"
       "ee\x85R."s,
       R"({"z":3,"a":2})"},  // of Python 2
      {"ccollections\nOrderedDict\n]\x85R."s, "{}"},
      {"ccollections\ndefaultdict\nc__builtin__\nlist\n\x85R(U\x01"
       "a]u."s,
       R"({"a":[]})"},
      {"ccollections\nCounter\n}(U\x01xK\x03u\x85R."s, R"({"x":3})"},
      {"c__builtin__\nset\n](K\x01K\x02"
       "e\x85R."s,
       R"({"$set":[1,2]})"},
      {"cbuiltins\nfrozenset\n](K\x01"
       "e\x85R."s,
       R"({"$set":[1]})"},
      {"c_codecs\nencode\nX\x05\x00\x00\x00"s
       "a\xc3\xbf\xc2\x80U\x06latin1\x86R."s,
       R"({"$bytes":"Yf+A"})"},
      {"c__builtin__\nbytearray\nX\x01\x00\x00\x00"s
       "aU\x07latin-1\x86R."s,
       R"({"$bytes":"YQ=="})"},
      {"c__builtin__\nbytes\n)R."s, R"({"$bytes":""})"},
      {"c__builtin__\ncomplex\nG\x3f\xf8\x00\x00\x00\x00\x00\x00G\xc0\x00\x00\x00\x00\x00\x00\x00\x86R."s,
       R"({"$symbol":"complex:1.5,-2.0"})"},
      {"cpathlib\nPosixPath\n(U\x01/U\x03tmpU\x01xtR."s, R"("/tmp/x")"},
      {"cpathlib\nPosixPath\n)R."s, R"(".")"},
  };
  for (const auto& [pickle, json] : cases) {
    SCOPED_TRACE(pickle);
    EXPECT_EQ(json_of(pickle), json);
  }
}

TEST(PickleTest, DictsWithOtherArgumentsAreRefused) {
  for (const std::string& pickle :
       {"ccollections\nOrderedDict\n}U\x01xK\x01s\x85R."s,
        "ccollections\nOrderedDict\n]U\x01xa\x85R."s,
        "ccollections\nOrderedDict\n](](K\x01K\x02"
        "eeq\x01\x85R0ccollections\nOrderedDict\nh\x01\x85R."s,  // a list of two dicts
        "ccollections\nCounter\n]U\x01xa\x85R."s, "ccollections\nCounter\n}\x85RU\x01xK\x01s."s,
        "ccollections\ndefaultdict\nN}U\x01xK\x01s\x86R."s}) {
    SCOPED_TRACE(testing::PrintToString(pickle));
    const Error refusal = value_refusal_of(pickle);
    EXPECT_EQ(refusal.kind(), ErrorKind::unsupported);
    EXPECT_THAT(refusal.what(), HasSubstr("expected entries as Python pickles them"));
  }
}

TEST(PickleTest, NumpyScalarsBecomeNumbers) {
  const auto scalar = [](const std::string& dtype, char order, const std::string& bytes) {
    return "cnumpy.core.multiarray\nscalar\ncnumpy\ndtype\nU" +
           std::string(1, static_cast<char>(dtype.size())) + dtype + "\x89\x88\x87R(K\x03U\x01" +
           order + "NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK" + '\0' + "tbC" +
           static_cast<char>(bytes.size()) + bytes + "\x86R.";
  };
  EXPECT_EQ(json_of(scalar("f8", '<', "\0\0\0\0\0\0\xf8\x3f"s)), "1.5");
  EXPECT_EQ(json_of(scalar("f4", '<', "\0\0\xc0\x3f"s)), "1.5");
  EXPECT_EQ(json_of(scalar("f4", '>', "\x3f\xc0\0\0"s)), "1.5");
  EXPECT_EQ(json_of(scalar("f2", '<', "\x00\x3e"s)), "1.5");
  EXPECT_EQ(json_of(scalar("i8", '<', "\xfe\xff\xff\xff\xff\xff\xff\xff"s)), "-2");
  EXPECT_EQ(json_of(scalar("i2", '>', "\xff\xfe"s)), "-2");
  EXPECT_EQ(json_of(scalar("u8", '<', "\xff\xff\xff\xff\xff\xff\xff\xff"s)),
            "18446744073709551615");
  EXPECT_EQ(json_of(scalar("b1", '|', "\1"s)), "true");
  EXPECT_THAT(value_refusal_of(scalar("f8", '<', "\0\0\0\0"s)).what(),
              HasSubstr("expected 8 bytes"));
  EXPECT_THAT(value_refusal_of(scalar("O8", '|', "\0\0\0\0\0\0\0\0"s)).what(),
              HasSubstr("dtype O8"));
}

TEST(PickleTest, MalformedArgumentsOfKnownTypesAreRefused) {
  const std::string cases[] = {
      "ctorch\nSize\n)R."s,
      "ctorch\nSize\nK\x01\x85R."s,
      "ctorch\ndevice\nK\x01\x85R."s,
      "ctorch\nSize\n."s,  // the class itself
      "cbuiltins\nlist\n."s,
      "cbuiltins\nlist\n)R."s,
      "c_codecs\nencode\nU\x01xU\x04rot1\x86R."s,
      "c_codecs\nencode\nX\x02\x00\x00\x00\xc4\x80U\x06latin1\x86R."s,
      "c__builtin__\ncomplex\nU\x01xU\x01y\x86R."s,
      "cnumpy.core.multiarray\nscalar\nNN\x86R."s,
      "}(]Nu."s,  // a list as a key
      "}(}Nu."s,
      "K\x01Q."s,  // a persistent id
  };
  for (const std::string& pickle : cases) {
    SCOPED_TRACE(testing::PrintToString(pickle));
    EXPECT_THAT(value_refusal_of(pickle).what(), HasSubstr("expected"));
  }
}

TEST(PickleTest, ObjectsNameTheByteTheyWereMadeAt) {
  const ObjectGraph graph =
      unpickle(std::vector<char>{'K', 1, '.'}, {.path = "a/b", .file_offset = 100}, plain());
  const Error error = error_of([&] { graph.root().as_str("name"); });
  EXPECT_STREQ(error.what(), "a/b: bytes [100, 101): pickle: name: expected str, found int 1");
  EXPECT_EQ(error.where().byte_range->begin, 100u);
}

// Reads 4 MB of nested small objects. Quadratic work anywhere would take minutes.
TEST(PickleTest, CostIsLinear) {
  std::string pickle = "}(";
  for (std::uint32_t i = 0; i < 200000; ++i)
    pickle += "J" + u32(i) + "]r" + u32(i) +
              "(K\x01K\x02"
              "e";
  pickle += "u";
  const ObjectGraph graph = read(pickle + ".");
  EXPECT_EQ(graph.root().num_entries("dict"), 200000u);
}

// Appends items to one list one at a time, and to other lists in between.
TEST(PickleTest, InterleavedGrowthKeepsEveryItem) {
  std::string pickle = "]q\x00]q\x01"s;
  for (int i = 0; i < 200; ++i) {
    pickle +=
        "h"s + '\0' + "K" + static_cast<char>(i) + "a0h\x01K" + static_cast<char>(255 - i) + "a0";
  }
  const ObjectGraph graph = read(pickle + "\x86.");
  for (std::size_t i = 0; i < 200; ++i) {
    EXPECT_EQ(graph.root().item(0).item(i).as_integer("a"), static_cast<std::int64_t>(i));
    EXPECT_EQ(graph.root().item(1).item(i).as_integer("b"), static_cast<std::int64_t>(255 - i));
  }
}

}  // namespace
}  // namespace tessera::formats::pickle
