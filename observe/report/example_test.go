// This file shows how the folder of a run is read.

package report_test

import (
	"fmt"
	"log"
	"os"
	"path/filepath"

	"github.com/stowage-dev/stowage/observe/report"
)

// A run that was stopped has no summary. The report shows what there is and says what
// is missing.
func ExampleRead() {
	dir, err := os.MkdirTemp("", "run")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	metrics := `{"step":1,"loss":5.5,"seconds":0.25,"device_bytes":1048576}
{"step":2,"loss":5.1,"seconds":0.2,"device_bytes":2097152}
`
	if err := os.WriteFile(filepath.Join(dir, report.MetricsFile), []byte(metrics), 0o644); err != nil {
		log.Fatal(err)
	}

	r, err := report.Read(dir)
	if err != nil {
		log.Fatal(err)
	}
	run := r.Runs[0]
	for i, step := range run.Steps.Step {
		fmt.Printf("step %d: loss %.1f, %.0f ms\n", step, run.Steps.Loss[i], run.Steps.Millis[i])
	}
	for _, sentence := range run.Missing {
		fmt.Println(sentence)
	}
	// Output:
	// step 1: loss 5.5, 250 ms
	// step 2: loss 5.1, 200 ms
	// summary.json is not there; the run was stopped or is under way, and peaks come from its metrics and traces
	// there are no traces; memory over time, streams and copies are not shown
	// environment.json is not there; the command and the machine are not known
}

func ExampleParseFigures() {
	summary := `{"peak_device_bytes": 1048576, "predicted_device_bytes": 1048576, "step_ms": 12.5, "identical": true}`
	for _, f := range report.ParseFigures([]byte(summary)) {
		fmt.Printf("%s: %g %s %s, forecast: %v\n", f.Label, f.Value, f.Unit, f.Text, f.Predicted != nil)
	}
	// Output:
	// device peak: 1.048576e+06 bytes , forecast: true
	// step time: 12.5 ms , forecast: false
	// identical: 1 text yes, forecast: false
}
