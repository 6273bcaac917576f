// The HTTP/1.1 reader of the model server is strict, and no cut of a stream changes what it reads.
#include "monolith/serving/native/rest/http_parser.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

namespace monolith {
namespace serving {
namespace {

using Result = HttpParser::Result;

HttpParser MakeParser() { return HttpParser(1000, 5000); }

int Refusal(std::string text) {
  HttpParser parser = MakeParser();
  EXPECT_EQ(parser.Parse(&text), Result::kRefused) << text;
  return parser.refusal();
}

TEST(HttpParserTest, ReadsPipelinedRequestsInPiecesOfAnySize) {
  const std::string text =
      "\r\nPOST /v1/models/a%3Ab:predict?x=1 HTTP/1.1\r\nHost: h\r\ncontent-length:  5 "
      "\r\n\r\nhello"
      "GET /x HTTP/1.0\r\n\r\n"
      "POST /y HTTP/1.1\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
      "3;ext\r\nabc\r\nA\r\n0123456789\r\n0\r\nTrailer: t\r\n\r\n";
  for (size_t piece = 1; piece <= text.size(); ++piece) {
    HttpParser parser = MakeParser();
    std::vector<HttpRequest> requests;
    std::string input;
    for (size_t start = 0; start < text.size(); start += piece) {
      input += text.substr(start, piece);
      Result result = parser.Parse(&input);
      while (result == Result::kComplete) {
        requests.push_back(parser.Take());
        result = parser.Parse(&input);
      }
      ASSERT_EQ(result, Result::kNeedsMore);
    }
    ASSERT_EQ(requests.size(), 3u);
    EXPECT_EQ(requests[0].method, "POST");
    EXPECT_EQ(requests[0].path, "/v1/models/a:b:predict");
    EXPECT_EQ(requests[0].body, "hello");
    EXPECT_TRUE(requests[0].keep_alive);
    EXPECT_EQ(requests[1].path, "/x");
    EXPECT_FALSE(requests[1].keep_alive);
    EXPECT_EQ(requests[2].body, "abc0123456789");
    EXPECT_FALSE(requests[2].keep_alive);
  }
}

TEST(HttpParserTest, RefusesWhatIsAmbiguousOrTooLarge) {
  EXPECT_EQ(Refusal("GET /\r\n\r\n"), 400);
  EXPECT_EQ(Refusal("GET x HTTP/1.1\r\n\r\n"), 400);
  EXPECT_EQ(Refusal("GET / HTTP/2.0\r\n\r\n"), 505);
  EXPECT_EQ(Refusal("G@T / HTTP/1.1\r\n\r\n"), 400);
  EXPECT_EQ(Refusal("GET /%zz HTTP/1.1\r\n\r\n"), 400);
  EXPECT_EQ(Refusal("GET / HTTP/1.1\r\n folded: x\r\n\r\n"), 400);
  EXPECT_EQ(Refusal("GET / HTTP/1.1\r\nno name\r\n\r\n"), 400);
  EXPECT_EQ(Refusal("POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n"), 400);
  EXPECT_EQ(Refusal("POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n"), 400);
  EXPECT_EQ(Refusal("POST / HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n"), 400);
  EXPECT_EQ(Refusal("POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n"),
            400);
  EXPECT_EQ(Refusal("POST / HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n"), 501);
  EXPECT_EQ(Refusal("POST / HTTP/1.1\r\nContent-Encoding: gzip\r\n\r\n"), 415);
  EXPECT_EQ(Refusal("POST / HTTP/1.1\r\nContent-Length: 5001\r\n\r\n"), 413);
  EXPECT_EQ(Refusal("POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1389\r\n"), 413);
  EXPECT_EQ(Refusal("POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabc\r\n"), 400);
  EXPECT_EQ(Refusal("POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n-2\r\n"), 400);
  EXPECT_EQ(Refusal("GET / HTTP/1.1\r\nx: " + std::string(2000, 'x')), 431);
}

TEST(HttpParserTest, TellsOfAnExpectationOnce) {
  HttpParser parser = MakeParser();
  std::string input = "POST / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\n";

  EXPECT_EQ(parser.Parse(&input), Result::kNeedsMore);

  EXPECT_TRUE(parser.TakeExpectation());
  EXPECT_FALSE(parser.TakeExpectation());
}

TEST(HttpParserTest, SurvivesAnything) {
  const std::string valid =
      "POST /v1/models/m:predict HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Type: a\r\n\r\n"
      "3\r\nabc\r\n0\r\n\r\nPOST / HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc";
  std::mt19937 random(3);
  for (int i = 0; i < 20'000; ++i) {
    std::string text = valid;
    for (uint32_t changes = random() % 4 + 1; changes > 0; --changes) {
      const size_t place = random() % text.size();
      if (random() % 2 == 0) {
        text[place] = static_cast<char>(random());
      } else {
        text.erase(place, random() % 5);
      }
      if (text.empty()) text = "G";
    }
    HttpParser parser = MakeParser();
    while (parser.Parse(&text) == Result::kComplete) parser.Take();
  }
}

}  // namespace
}  // namespace serving
}  // namespace monolith
