// This file shows how a report becomes a page.

package page_test

import (
	"bytes"
	"fmt"
	"log"
	"strings"

	"github.com/stowage-dev/stowage/observe/report"
	"github.com/stowage-dev/stowage/observe/report/page"
)

func ExampleWrite() {
	r := &report.Report{Title: "two runs", Runs: []report.Run{{Name: "keep"}, {Name: "offload"}}}
	var html bytes.Buffer // usually report.html
	if err := page.Write(&html, r); err != nil {
		log.Fatal(err)
	}
	fmt.Println(strings.HasPrefix(html.String(), "<!doctype html>"), strings.Contains(html.String(), "<title>two runs"))
	// Output: true true
}
