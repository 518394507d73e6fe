#include "object_store/s3_uploads.h"

#include <algorithm>
#include <charconv>
#include <functional>
#include <utility>

#include "base/digest.h"
#include "object_store/md5.h"
#include "object_store/url.h"
#include "object_store/xml_scan.h"

namespace tessera::object_store {
namespace {

using Call = S3Server::Call;
using Answer = S3Server::Answer;
using Support = S3Server::Crc32Support;

constexpr std::string_view kPermissionToWrite =
    "to write (s3:PutObject, s3:AbortMultipartUpload, s3:ListMultipartUploadParts; s3:DeleteObject "
    "to replace)";
constexpr std::string_view kPermissionToRemove = "to remove objects (s3:DeleteObject)";
constexpr std::string_view kCompletion = "completion of the upload";
constexpr int kMaxMismatches = 3;  // wrong checksums before an upload fails
constexpr const char* kCrc32Header = "x-amz-checksum-crc32";
constexpr std::uint64_t kMaxParts = 10'000;  // of an upload, the limit of S3
constexpr int kMaxUploadPages = 10'000;      // of a list
// The time in which S3 joins the parts of a large object.
constexpr std::chrono::seconds kMaxCompletion{600};

/// Returns the version of an object as lists show it. An ETag that is not known stays empty.
ObjectVersion version_of(std::uint64_t nbytes, const std::string& etag) {
  return {.nbytes = nbytes, .etag = etag.empty() ? etag : '"' + etag + '"'};
}

/// Whether the server encrypts objects with a key of KMS or of the client (SSE-KMS, SSE-C), so that
/// ETags are not MD5 digests.
bool has_other_etags(const HttpResponse& response) {
  return response.header("x-amz-server-side-encryption").starts_with("aws:kms") ||
         !response.header("x-amz-server-side-encryption-customer-algorithm").empty();
}

/// Whether an answer can mean that the server does not know a header of the request.
bool may_not_know_header(const Answer& answer) {
  return answer.response.status == 400 || answer.response.status == 501;
}

/// Calls `take` with the path and text of each XML element below the root: `Part/ETag`.
void read_answer(const std::string& url, const std::string& xml,
                 const std::function<void(std::string_view path, std::string text)>& take) {
  scan_xml(xml, url, [&](std::span<const std::string> path, std::string text) {
    std::string below;
    for (const std::string& name : path.subspan(1)) below += (below.empty() ? "" : "/") + name;
    if (!below.empty()) take(below, std::move(text));
  });
}

std::uint64_t number_in(const std::string& url, const std::string& text) {
  std::uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error == std::errc() && end == text.data() + text.size() && !text.empty()) return number;
  throw Error::expected(ErrorKind::corruption, {.path = url}, "answer of the server", "a number",
                        "'" + printable(text) + "'");
}

int part_number_in(const std::string& url, const std::string& text) {
  const std::uint64_t number = number_in(url, text);
  if (1 <= number && number <= kMaxParts) return static_cast<int>(number);
  throw Error::expected(ErrorKind::corruption, {.path = url}, "answer of the server",
                        "a part number from 1 to " + std::to_string(kMaxParts),
                        "'" + printable(text) + "'");
}

std::uint64_t nbytes_of(const std::vector<UploadedPart>& parts) {
  std::uint64_t nbytes = 0;
  for (const UploadedPart& part : parts) nbytes += part.nbytes;
  return nbytes;
}

[[noreturn]] void refuse_long_list(const std::string& url) {
  throw Error::expected(ErrorKind::corruption, {.path = url}, "answer of the server",
                        "a list of at most " + std::to_string(kMaxUploadPages) + " pages", "more");
}

}  // namespace

Error S3Uploads::failure(const std::string& url, const Answer& answer,
                         std::string_view what) const {
  const HttpResponse& response = answer.response;
  if (response.status >= 300 && response.status < 500) {
    return server_.error_of(url, answer, kPermissionToWrite);
  }
  const std::string code = answer.error_code();
  return Error::expected(ErrorKind::io, {.path = url}, what, "success",
                         response.failure_in_words() + (code.empty() ? "" : " " + printable(code)));
}

bool S3Uploads::holds(const std::string& url, const ObjectVersion& version,
                      const std::vector<UploadedPart>& parts) {
  if (version.nbytes != nbytes_of(parts)) return false;
  std::uint64_t begin = 0;
  std::vector<std::byte> bytes;
  for (const UploadedPart& part : parts) {
    bytes.resize(static_cast<std::size_t>(part.nbytes));
    server_.read(url, version, begin, bytes);
    if (tessera::crc32(0, bytes) != part.crc32) return false;
    begin += part.nbytes;
  }
  return true;
}

/// Returns the version of the object at the URL if it has the bytes of `parts`. `etag`: of such an
/// object if ETags are MD5 digests, without quotes; empty if it is not known.
std::optional<ObjectVersion> S3Uploads::find_equal(const std::string& url,
                                                   const std::vector<UploadedPart>& parts,
                                                   const std::string& etag) {
  auto found = server_.find(url);
  if (!found || found->version.nbytes != nbytes_of(parts)) return std::nullopt;
  const bool has_etag = !etag.empty() && without_quotes(found->version.etag) == etag;
  if (!has_etag && !holds(url, found->version, parts)) return std::nullopt;
  return std::move(found->version);
}

/// Sends a request that makes an object. With Existing::refuse, asks the server to do so only if
/// there is no object (else status 412). If the server does not know this condition (status 501),
/// checks that there is no object (else status 412), and sends the request without the condition.
Answer S3Uploads::send_if_free(const std::string& url, Call call, Existing existing) {
  if (existing == Existing::refuse) call.headers["if-none-match"] = "*";
  Answer answer = server_.send(url, call);
  if (answer.response.status != 501 || existing == Existing::replace) return answer;
  call.headers.erase("if-none-match");
  if (server_.find(url)) {
    answer.response.status = 412;
    return answer;
  }
  return server_.send(url, call);
}

namespace {

[[noreturn]] void refuse_existing(const std::string& url) {
  throw Error::expected(ErrorKind::already_exists, {.path = url}, "object", "no object at this URL",
                        "an object", "another program or an earlier run wrote it");
}

[[noreturn]] void refuse_checksum(const std::string& url, std::string_view what,
                                  std::string_view kind, const std::string& expected,
                                  const std::string& found) {
  const std::string name(kind);
  throw Error::expected(
      ErrorKind::io, {.path = url}, what, name + " " + expected, name + " " + printable(found),
      kind == "ETag" ? "the bytes were damaged in transfer, or the server's ETags "
                       "are no MD5 digests"
                     : "the bytes were damaged in transfer");
}

/// What a successful answer to an upload shows about the bytes.
enum class Verdict { good, unchecked, damaged };

}  // namespace

/// The body of a request, with its checksums.
class S3Uploads::Body {
 public:
  explicit Body(std::span<const std::byte> bytes)
      : bytes_(bytes), crc32_(tessera::crc32(0, bytes)) {}

  std::span<const std::byte> bytes() const { return bytes_; }
  std::uint32_t crc32() const { return crc32_; }
  /// Cost: computed at the first call, 2 seconds for 1 GB.
  const Md5& md5() {
    if (!md5_) md5_ = Md5::of(bytes_);
    return *md5_;
  }
  void set_headers(std::map<std::string, std::string>& headers, const Checks& checks) {
    headers.erase("content-md5");
    headers.erase(kCrc32Header);
    if (checks.md5) headers["content-md5"] = md5().base64();
    if (checks.crc32) headers[kCrc32Header] = crc32_text(crc32_);
  }
  Verdict verdict(const HttpResponse& response, const Checks& checks) {
    const std::string crc = response.header(kCrc32Header);
    const std::string etag = without_quotes(response.header("etag"));
    if (checks.crc32 && !crc.empty() && crc != crc32_text(crc32_)) return Verdict::damaged;
    if (checks.md5 && looks_like_md5(etag) && etag != md5().hex() && !has_other_etags(response)) {
      return Verdict::damaged;
    }
    return crc.empty() && !checks.md5 ? Verdict::unchecked : Verdict::good;
  }
  [[noreturn]] void refuse(const std::string& url, std::string_view what,
                           const HttpResponse& response) {
    const std::string crc = response.header(kCrc32Header);
    if (!crc.empty() && crc != crc32_text(crc32_)) {
      refuse_checksum(url, what, "CRC-32", crc32_text(crc32_), crc);
    }
    refuse_checksum(url, what, "ETag", md5().hex(), without_quotes(response.header("etag")));
  }

 private:
  std::span<const std::byte> bytes_;
  std::uint32_t crc32_;
  std::optional<Md5> md5_;
};

/// Chooses the checksums of a request. `check_of_upload`: for a part; nothing for a whole object.
S3Uploads::Checks S3Uploads::checks_for(std::optional<BodyCheck> check_of_upload) const {
  const Support support = server_.crc32_support();
  if (!check_of_upload) return {.md5 = support != Support::yes, .crc32 = support != Support::no};
  const bool has_crc32 = *check_of_upload == BodyCheck::crc32;
  return {.md5 = !has_crc32 || support == Support::no, .crc32 = has_crc32};
}

/// Remembers whether the server checks CRCs. Such a server repeats the value in its answer.
void S3Uploads::note_crc32(const Checks& checks, const Answer& answer) {
  if (!checks.crc32) return;
  const bool is_repeated = !answer.response.header(kCrc32Header).empty();
  server_.note_crc32_support(is_repeated ? Support::yes : Support::no);
}

/// Sends bytes with checksums. Sends them again if the answer shows that they were damaged, or not
/// checked. Returns the last answer, whatever its status. Throws when they are damaged 3 times.
Answer S3Uploads::send_body(const std::string& url, Call call, Body& body, std::string_view what,
                            Existing existing, std::optional<BodyCheck> check_of_upload) {
  call.body = body.bytes();
  for (int num_mismatches = 0;;) {
    const Checks checks = checks_for(check_of_upload);
    body.set_headers(call.headers, checks);
    Answer answer = send_if_free(url, call, existing);
    if (!check_of_upload && checks.crc32 && checks.md5 && may_not_know_header(answer)) {
      server_.note_crc32_support(Support::no);
      continue;
    }
    if (!answer.is_success()) return answer;
    note_crc32(checks, answer);
    const Verdict verdict = body.verdict(answer.response, checks);
    if (verdict == Verdict::good) return answer;
    if (verdict == Verdict::damaged && ++num_mismatches == kMaxMismatches) {
      body.refuse(url, what, answer.response);
    }
    existing = Existing::replace;  // the object that this run has just written
  }
}

ObjectVersion S3Uploads::put(const std::string& url, std::span<const std::byte> bytes,
                             Existing existing) {
  Body body(bytes);
  const Answer answer = send_body(url, {.method = "PUT"}, body, "upload", existing, std::nullopt);
  if (answer.response.status == 412) {
    // The object may be the result of an earlier attempt that succeeded although its answer was
    // lost.
    const UploadedPart whole{.number = 1, .nbytes = bytes.size(), .crc32 = body.crc32()};
    if (auto found = find_equal(url, {whole}, body.md5().hex())) return *std::move(found);
    refuse_existing(url);
  }
  if (!answer.is_success()) throw failure(url, answer, "upload");
  return version_of(bytes.size(), without_quotes(answer.response.header("etag")));
}

MultipartUpload S3Uploads::begin(const std::string& url) {
  constexpr const char* kAlgorithmHeader = "x-amz-checksum-algorithm";
  Call call{.method = "POST", .query = {{"uploads", ""}}};
  const bool asks_for_crc32 = server_.crc32_support() != Support::no;
  if (asks_for_crc32) call.headers[kAlgorithmHeader] = "CRC32";
  Answer answer = server_.send(url, call);
  if (asks_for_crc32 && may_not_know_header(answer)) {
    server_.note_crc32_support(Support::no);
    call.headers.clear();
    answer = server_.send(url, call);
  }
  if (!answer.is_success()) throw failure(url, answer, "begin of an upload");
  MultipartUpload upload;
  if (answer.response.header(kAlgorithmHeader) == "CRC32") {
    upload.check = BodyCheck::crc32;
  } else {
    server_.note_crc32_support(Support::no);
  }
  read_answer(url, answer.body, [&](std::string_view path, std::string text) {
    if (path == "UploadId") upload.id = std::move(text);
  });
  if (upload.id.empty()) {
    throw Error::expected(ErrorKind::io, {.path = url}, "begin of an upload", "an UploadId", "none",
                          "does the server support multipart uploads?");
  }
  return upload;
}

UploadedPart S3Uploads::put_part(const std::string& url, const MultipartUpload& upload, int number,
                                 std::span<const std::byte> bytes) {
  const std::string what = "upload of part " + std::to_string(number);
  const Call call{.method = "PUT",
                  .query = {{"partNumber", std::to_string(number)}, {"uploadId", upload.id}}};
  Body body(bytes);
  const Answer answer = send_body(url, call, body, what, Existing::replace, upload.check);
  if (!answer.is_success()) throw failure(url, answer, what);
  UploadedPart part{.number = number,
                    .nbytes = bytes.size(),
                    .etag = answer.response.header("etag"),
                    .crc32 = body.crc32()};
  if (part.etag.empty()) {
    throw Error::expected(ErrorKind::io, {.path = url}, what, "an ETag", "none");
  }
  part.has_md5_etag =
      looks_like_md5(without_quotes(part.etag)) && !has_other_etags(answer.response);
  return part;
}

/// Throws if the checksum of a completed object is not that of its parts. `crc32`: as the server
/// stated it; empty if it did not.
void S3Uploads::require_checksum_of(const std::string& url, const std::vector<UploadedPart>& parts,
                                    const std::string& etag, const std::string& crc32) {
  if (!crc32.empty()) {
    if (is_crc32_of_parts(crc32, parts)) return;
    refuse_checksum(url, kCompletion, "CRC-32", crc32_of_parts(parts), crc32);
  }
  const auto expected = etag_of_parts(parts);
  if (expected && looks_like_md5_of_parts(etag, parts.size()) && etag != *expected) {
    refuse_checksum(url, kCompletion, "ETag", *expected, etag);
  }
}

ObjectVersion S3Uploads::complete(const std::string& url, const MultipartUpload& upload,
                                  const std::vector<UploadedPart>& parts, Existing existing) {
  const std::string xml = completion_in_xml(parts, upload.check);
  const Answer answer = send_if_free(url,
                                     {.method = "POST",
                                      .query = {{"uploadId", upload.id}},
                                      .headers = {{"content-type", "application/xml"}},
                                      .body = std::as_bytes(std::span(xml)),
                                      .max_stall = kMaxCompletion},
                                     existing);
  const int status = answer.response.status;
  if (status == 412 || (status == 404 && answer.error_code() == "NoSuchUpload")) {
    // An earlier attempt may have succeeded although its answer was lost.
    if (auto found = find_equal(url, parts, etag_of_parts(parts).value_or(""))) {
      abort(url, upload.id);
      return *std::move(found);
    }
    if (status == 412) refuse_existing(url);
    throw Error::expected(ErrorKind::io, {.path = url}, kCompletion, "the upload that was begun",
                          "none", "another program aborted it, or a rule of the bucket did");
  }
  if (!answer.is_success()) throw failure(url, answer, kCompletion);
  std::string etag;
  std::string crc32;
  read_answer(url, answer.body, [&](std::string_view path, std::string text) {
    if (path == "ETag") etag = without_quotes(std::move(text));
    if (path == "ChecksumCRC32" && upload.check == BodyCheck::crc32) crc32 = std::move(text);
  });
  require_checksum_of(url, parts, etag, crc32);
  return version_of(nbytes_of(parts), etag);
}

void S3Uploads::abort(const std::string& url, const std::string& id) {
  const Answer answer = server_.send(url, {.method = "DELETE", .query = {{"uploadId", id}}});
  if (!answer.is_success() && answer.response.status != 404) {
    throw failure(url, answer, "removal of an unfinished upload");
  }
}

std::optional<UploadedPart> listed_part(const UploadedPart& listed,
                                        std::span<const std::byte> bytes) {
  if (listed.nbytes != bytes.size()) return std::nullopt;
  if (without_quotes(listed.etag) != Md5::of(bytes).hex()) return std::nullopt;
  UploadedPart part = listed;
  part.has_md5_etag = true;
  part.crc32 = crc32(0, bytes);
  return part;
}

ListedParts S3Uploads::list_parts(const std::string& url, const std::string& id) {
  ListedParts listed;
  Server::Query query{{"uploadId", id}};
  int num_pages = 0;
  for (;;) {
    const Answer answer = server_.send(url, {.method = "GET", .query = query});
    if (answer.response.status == 404) return {};
    if (!answer.is_success()) throw failure(url, answer, "list of the parts");
    UploadedPart part;
    std::string next;
    bool is_truncated = false;
    read_answer(url, answer.body, [&](std::string_view path, std::string text) {
      if (path == "Part/PartNumber") part.number = part_number_in(url, text);
      if (path == "Part/Size") part.nbytes = number_in(url, text);
      if (path == "Part/ETag") part.etag = std::move(text);
      if (path == "Part") listed.parts.push_back(std::exchange(part, {}));
      if (path == "ChecksumAlgorithm" && text == "CRC32") listed.check = BodyCheck::crc32;
      if (path == "NextPartNumberMarker") next = std::move(text);
      if (path == "IsTruncated") is_truncated = text == "true";
    });
    if (!is_truncated || next.empty()) return listed;
    if (listed.parts.size() > kMaxParts || ++num_pages == kMaxUploadPages) refuse_long_list(url);
    query = {{"part-number-marker", next}, {"uploadId", id}};
  }
}

std::vector<UnfinishedUpload> S3Uploads::list_unfinished(const std::string& url) {
  std::vector<UnfinishedUpload> uploads;
  const Server::Query wanted{
      {"encoding-type", "url"}, {"prefix", parse_url(url).path}, {"uploads", ""}};
  Server::Query query = wanted;
  int num_pages = 0;
  for (;;) {
    const Answer answer =
        server_.send(url, {.method = "GET", .query = query, .about = Call::About::bucket});
    if (!answer.is_success()) return uploads;
    const std::size_t num_known = uploads.size();
    UnfinishedUpload upload;
    std::string next_key;
    std::string next_id;
    bool is_truncated = false;
    bool is_encoded = false;
    read_answer(url, answer.body, [&](std::string_view path, std::string text) {
      if (path == "EncodingType") is_encoded = text == "url";
      if (path == "Upload/Key") upload.key = std::move(text);
      if (path == "Upload/UploadId") upload.id = std::move(text);
      if (path == "Upload/ChecksumAlgorithm" && text == "CRC32") upload.check = BodyCheck::crc32;
      if (path == "Upload") uploads.push_back(std::exchange(upload, {}));
      if (path == "NextKeyMarker") next_key = std::move(text);
      if (path == "NextUploadIdMarker") next_id = std::move(text);
      if (path == "IsTruncated") is_truncated = text == "true";
    });
    const auto decoded = [&](const std::string& key) {
      return is_encoded ? form_decode(key).value_or(key) : key;
    };
    for (std::size_t i = num_known; i < uploads.size(); ++i) {
      uploads[i].key = decoded(uploads[i].key);
    }
    if (!is_truncated || next_key.empty()) break;
    if (++num_pages == kMaxUploadPages) refuse_long_list(url);
    query = wanted;
    query.emplace_back("key-marker", decoded(next_key));
    query.emplace_back("upload-id-marker", next_id);
  }
  std::erase_if(uploads, [&](const UnfinishedUpload& upload) {
    return !upload.key.starts_with(parse_url(url).path);
  });
  return uploads;
}

void S3Uploads::remove(const std::string& url) {
  const Answer answer = server_.send(url, {.method = "DELETE"});
  if (answer.is_success() || answer.response.status == 404) return;
  if (answer.response.status == 403) throw server_.error_of(url, answer, kPermissionToRemove);
  throw failure(url, answer, "removal");
}

}  // namespace tessera::object_store
