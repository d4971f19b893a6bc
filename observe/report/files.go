// This file owns the names of the files in a run's folder, which writers and the report
// must agree on:
//
//	config.yaml         the options
//	environment.json    the machine, the command and when it began
//	metrics.jsonl       one line a step
//	summary.json        the results of the run, and each rank's policy with its reasons
//	trace/rank-N.trace  the trace of rank N; rank-N.K.trace after K resumptions
//	report.html         the page
//	trace.pftrace       the traces for Perfetto
//
// A comparison has environment.json, report.html and trace.pftrace, and one folder for
// each of its runs with the others.

package report

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
)

// Names of the files in a run's folder.
const (
	ConfigFile      = "config.yaml"
	EnvironmentFile = "environment.json"
	MetricsFile     = "metrics.jsonl"
	SummaryFile     = "summary.json"
	TraceFolder     = "trace"
	PageFile        = "report.html"
	PerfettoFile    = "trace.pftrace"
)

// Environment is the content of environment.json.
type Environment struct {
	Command string            `json:"command"`
	Began   string            `json:"began"` // RFC 3339
	Machine map[string]string `json:"machine"`
	Runs    []string          `json:"runs,omitempty"` // the folders of a comparison, in order
}

// RankSummary is what summary.json has for each rank under the key "by_rank".
type RankSummary struct {
	Rank      int         `json:"rank"`
	Device    int64       `json:"peak_device_bytes"`
	Host      int64       `json:"peak_host_bytes"`
	Predicted int64       `json:"predicted_device_bytes,omitempty"`
	Step      float64     `json:"predicted_step_ms,omitempty"` // the forecast when the policy was chosen
	Policy    []PolicyRow `json:"policy"`
	Notes     []string    `json:"notes,omitempty"`
	Figures   []Figure    `json:"figures,omitempty"`
	Pools     []Pool      `json:"pools,omitempty"`
}

// TraceName returns the path of a rank's trace in a run's folder. Part is the number of
// times that the run was resumed before.
func TraceName(rank, part int) string {
	if part == 0 {
		return filepath.Join(TraceFolder, fmt.Sprintf("rank-%d.trace", rank))
	}
	return filepath.Join(TraceFolder, fmt.Sprintf("rank-%d.%d.trace", rank, part))
}

var traceName = regexp.MustCompile(`^rank-(\d{1,6})(?:\.(\d{1,6}))?\.trace$`)

// TraceFile is the file of one trace.
type TraceFile struct {
	Path       string
	Rank, Part int
}

// TraceFiles returns the traces in a run's folder in the order of rank and part.
func TraceFiles(dir string) (out []TraceFile) {
	list, _ := os.ReadDir(filepath.Join(dir, TraceFolder)) // without a folder there are no traces
	for _, f := range list {
		m := traceName.FindStringSubmatch(f.Name())
		if m == nil {
			continue
		}
		x := TraceFile{Path: filepath.Join(dir, TraceFolder, f.Name())}
		x.Rank, _ = strconv.Atoi(m[1])
		x.Part, _ = strconv.Atoi(m[2]) // the first part has no number
		out = append(out, x)
	}
	slices.SortFunc(out, func(a, b TraceFile) int {
		return cmp.Or(cmp.Compare(a.Rank, b.Rank), cmp.Compare(a.Part, b.Part))
	})
	return out
}
