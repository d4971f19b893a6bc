// This file shows how a run is served.

package live_test

import (
	"bufio"
	"fmt"
	"log"
	"net/http"
	"strings"

	"github.com/stowage-dev/stowage/observe/live"
)

func ExampleServer() {
	server, err := live.Listen(":0", "1.0")
	if err != nil {
		log.Fatal(err)
	}
	defer server.Close()

	server.Begin(live.Run{Model: "tiny-moe", Layout: "dp 1", Policies: []string{"offload"}, Steps: 100})
	server.Step(live.Step{Policy: "offload", Number: 1, Loss: 5.5, Tokens: 4096, Seconds: 0.5})

	answer, err := http.Get(server.URL() + "metrics")
	if err != nil {
		log.Fatal(err)
	}
	defer answer.Body.Close()
	for lines := bufio.NewScanner(answer.Body); lines.Scan(); {
		if line := lines.Text(); strings.HasPrefix(line, "stowage_loss") || strings.HasPrefix(line, "stowage_tokens_per_second") {
			fmt.Println(line)
		}
	}
	// Output:
	// stowage_loss{policy="offload"} 5.5
	// stowage_tokens_per_second{policy="offload"} 8192
}
