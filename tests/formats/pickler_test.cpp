#include "formats/pickle/pickler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>

#include "tessera/base/error.h"

namespace tessera::formats::pickle {
namespace {

using namespace std::string_literals;

std::string pickled(const Value& value, int protocol = 2) {
  Pickler pickler(protocol);
  pickle_value(pickler, value);
  return std::move(pickler).finish();
}

// What CPython's pickle.dumps(value, 2) gives.
TEST(PicklerTest, IntegersAreAsPythonWritesThem) {
  EXPECT_EQ(pickled(0), "\x80\x02K\x00."s);
  EXPECT_EQ(pickled(255), "\x80\x02K\xff."s);
  EXPECT_EQ(pickled(256), "\x80\x02M\x00\x01."s);
  EXPECT_EQ(pickled(65535), "\x80\x02M\xff\xff."s);
  EXPECT_EQ(pickled(65536), "\x80\x02J\x00\x00\x01\x00."s);
  EXPECT_EQ(pickled(-1), "\x80\x02J\xff\xff\xff\xff."s);
  EXPECT_EQ(pickled(std::int64_t{2147483647}), "\x80\x02J\xff\xff\xff\x7f."s);
  EXPECT_EQ(pickled(std::int64_t{2147483648}), "\x80\x02\x8a\x05\x00\x00\x00\x80\x00."s);
  EXPECT_EQ(pickled(std::int64_t{-2147483649}), "\x80\x02\x8a\x05\xff\xff\xff\x7f\xff."s);
  EXPECT_EQ(pickled(std::numeric_limits<std::int64_t>::min()),
            "\x80\x02\x8a\x08\x00\x00\x00\x00\x00\x00\x00\x80."s);
}

TEST(PicklerTest, IntegersOfAnySizeAreTheShortestTwosComplement) {
  EXPECT_EQ(pickled(Value::BigInt{"18446744073709551615"}),
            "\x80\x02\x8a\x09\xff\xff\xff\xff\xff\xff\xff\xff\x00."s);
  EXPECT_EQ(pickled(Value::BigInt{"-1180591620717411303424"}),  // -2^70
            "\x80\x02\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x00\xc0."s);
  // 2^2040 needs 256 bytes, one more than the short form's length can say.
  std::string decimal = "1";
  for (int bit = 0; bit < 2040; ++bit) {
    int carry = 0;
    for (auto digit = decimal.rbegin(); digit != decimal.rend(); ++digit) {
      const int twice = (*digit - '0') * 2 + carry;
      *digit = static_cast<char>('0' + twice % 10);
      carry = twice / 10;
    }
    if (carry != 0) decimal.insert(0, 1, '1');
  }
  EXPECT_EQ(pickled(Value::BigInt{decimal}),
            "\x80\x02\x8b\x00\x01\x00\x00"s + std::string(255, '\0') + "\x01."s);
}

TEST(PicklerTest, FloatsAreBigEndianBits) {
  EXPECT_EQ(pickled(0.1), "\x80\x02G\x3f\xb9\x99\x99\x99\x99\x99\x9a."s);
  EXPECT_EQ(pickled(-std::numeric_limits<double>::infinity()),
            "\x80\x02G\xff\xf0\x00\x00\x00\x00\x00\x00."s);
}

TEST(PicklerTest, ContainersKeepTheirKindAndOrder) {
  EXPECT_EQ(pickled(Value::List{}), "\x80\x02]."s);
  EXPECT_EQ(pickled(Value::Dict{}), "\x80\x02}."s);
  EXPECT_EQ(pickled(Value::Tuple{}), "\x80\x02)."s);
  EXPECT_EQ(pickled(Value::List{1, true, Value()}), "\x80\x02](K\x01\x88Ne."s);
  EXPECT_EQ(pickled(Value::Tuple{{1, 2}}), "\x80\x02(K\x01K\x02t."s);
  EXPECT_EQ(pickled(Value::Dict{{"b", 1}, {2, "a"}}),
            "\x80\x02}(X\x01\x00\x00\x00"s + "bK\x01K\x02X\x01\x00\x00\x00"s + "au."s);
  EXPECT_EQ(pickled(Value::Set{{3}}),
            "\x80\x02"s + "c__builtin__\nset\nq\x00](K\x03"s + "e\x85R."s);
}

TEST(PicklerTest, SurrogatesAreWrittenAsPythonDoes) {
  EXPECT_EQ(pickled("a\xed\xa0\x80"), "\x80\x02X\x04\x00\x00\x00"s + "a\xed\xa0\x80.");
  EXPECT_THROW(pickled("a\xed\xa0"), Error);
}

TEST(PicklerTest, BytesOfProtocol2AreEncodedText) {
  EXPECT_EQ(pickled(Value::Bytes{"a\xff"}), "\x80\x02"s +
                                                "c_codecs\nencode\nq\x00X\x03\x00\x00\x00"s +
                                                "a\xc3\xbfX\x06\x00\x00\x00latin1\x86R."s);
  EXPECT_EQ(pickled(Value::Bytes{"a\xff"}, 4), "\x80\x04"s + "C\x02" + "a\xff."s);
}

TEST(PicklerTest, SymbolsAreTheConstantsTheyName) {
  EXPECT_EQ(pickled(Value::Symbol{"torch.bfloat16"}), "\x80\x02"s + "ctorch\nbfloat16\nq\x00."s);
  EXPECT_EQ(pickled(Value::Symbol{"device:cuda:1"}),
            "\x80\x02"s + "ctorch\ndevice\nq\x00X\x06\x00\x00\x00"s + "cuda:1\x85R."s);
  EXPECT_EQ(pickled(Value::Symbol{"torch.strided"}),
            "\x80\x02"s + "ctorch.serialization\n_get_layout\nq\x00X\x0d\x00\x00\x00"s +
                "torch.strided\x85R."s);
  EXPECT_EQ(pickled(Value::Symbol{"complex:0.1,-inf"}),
            "\x80\x02"s + "c__builtin__\ncomplex\nq\x00G\x3f\xb9\x99\x99\x99\x99\x99\x9a"s +
                "G\xff\xf0\x00\x00\x00\x00\x00\x00\x86R."s);
  for (const char* unknown : {"os.system", "torch.load", "complex:1", "complex:1,2j"}) {
    EXPECT_THROW(pickled(Value::Symbol{unknown}), Error) << unknown;
  }
}

TEST(PicklerTest, InternedTextAndGlobalsAreWrittenOnce) {
  Pickler pickler(4);
  pickler.interned("offset");
  pickler.interned("offset");
  pickler.global("torch", "Size");
  pickler.global("torch", "Size");
  EXPECT_EQ(std::move(pickler).finish(), "\x80\x04\x8c\x06offset\x94h\x00"s + "\x8c\x05torch\x94"s +
                                             "\x8c\x04Size\x94\x93\x94h\x03."s);
}

TEST(PicklerTest, InternedTextIsNotTakenForAGlobal) {
  Pickler pickler(2);
  pickler.interned("torch\nSize");
  pickler.global("torch", "Size");
  EXPECT_EQ(std::move(pickler).finish(),
            "\x80\x02X\x0a\x00\x00\x00torch\nSizeq\x00"s + "ctorch\nSize\nq\x01."s);
}

TEST(PicklerTest, MemoIndicesAbove255AreLong) {
  Pickler pickler(2);
  for (int i = 0; i < 257; ++i) pickler.interned(std::to_string(i));
  pickler.interned("256");
  const std::string bytes = std::move(pickler).finish();
  EXPECT_TRUE(bytes.ends_with("r\x00\x01\x00\x00j\x00\x01\x00\x00."s));
}

}  // namespace
}  // namespace tessera::formats::pickle
