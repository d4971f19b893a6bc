// This file owns the table of what is printed and shown of results whose figures all differ. A
// change of any figure or word is seen. Write it anew with -update if the change is meant.

package bench

import (
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/golden"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// numbered gives every field of a result a value of its own, and lists two entries.
func numbered(v reflect.Value, n *int) {
	*n++
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Field(i).CanSet() {
				numbered(v.Field(i), n)
			}
		}
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		for i := range 2 {
			numbered(v.Index(i), n)
		}
	case reflect.Map: // choices
		v.Set(reflect.ValueOf(map[memory.Choice]int{memory.Keep: *n, memory.Offload: *n + 1, memory.Choices - 1: *n + 2}))
	case reflect.String:
		v.SetString(fmt.Sprintf("word %d", *n))
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Float64:
		v.SetFloat(float64(*n) + 0.5)
	case reflect.Int, reflect.Int64:
		v.SetInt(int64(*n) << 20)
		if v.Type() == reflect.TypeFor[int]() {
			v.SetInt(int64(*n))
		}
	case reflect.Uint64, reflect.Uint32:
		v.SetUint(uint64(*n))
	}
}

func number[T any]() (r T) {
	n := 0
	numbered(reflect.ValueOf(&r).Elem(), &n)
	return r
}

func TestSaidOfResults(t *testing.T) {
	var b bytes.Buffer
	o := number[Offload]()
	o.Links = memory.Links{Out: 1e9, In: 2e9, Both: 3e9}
	OffloadText(&b, o)
	o.found, o.Equal, o.StashedBytes, o.Groups = true, false, 0, o.Groups[1:]
	o.Groups[0].Units = map[memory.Choice]int{memory.Recompute: 1, memory.Keep: 0}
	OffloadText(&b, o)
	o.Budget = 0
	OffloadText(&b, o)
	p := number[Pools]()
	PoolsText(&b, &p)
	p.Models[1].Weights.Pools[0].Waste, p.Models[1].Weights.Pools[1].Waste, p.Models[0].Weights.Pools[1].Pool = 2.02, 2.04, "fixed"
	b.Write(PoolsSVG(&p))
	p.Models = p.Models[:1]
	PoolsText(&b, &p)
	r := number[Replay]()
	for _, again := range []int{3, 0} {
		r.StepsRerun = again
		ReplayHead(&b, &r)
		ReplayText(&b, r.Ranks[1])
		ReplayFoot(&b, &r)
	}
	r.Ranks = nil
	ReplayFoot(&b, &r)
	e := Entry{Bench: "copy", Hardware: "a machine", Date: "today", Figures: map[string]float64{"a_ms": 2, "b_gbps": 3, "c": 0}}
	CompareText(&b, e, nil)
	CompareText(&b, e, &Entry{Date: "before", Figures: map[string]float64{"a_ms": 1, "b_gbps": 1, "d": 4}})
	CompareText(&b, e, &Entry{Date: "before", Figures: map[string]float64{"a_ms": 4, "b_gbps": 0, "c": 4}})
	golden.Check(t, "said.txt", b.String())
}

// shown returns the data of a page without what differs between machines and moments.
func shown(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	for _, m := range regexp.MustCompile(`>(H4sI[A-Za-z0-9+/=\s]+)<`).FindAllSubmatch(text, -1) {
		z, err := gzip.NewReader(base64.NewDecoder(base64.StdEncoding, bytes.NewReader(m[1])))
		if err != nil {
			t.Fatal(err)
		}
		data, err := io.ReadAll(z)
		if err != nil {
			t.Fatal(err)
		}
		out.Write(regexp.MustCompile(`"environment":\{[^}]*\},?|"(made|began|start)":("[^"]*"|\d+),?`).ReplaceAll(data, nil))
		out.WriteByte('\n')
	}
	if out.Len() == 0 {
		t.Fatalf("%s holds no data", file)
	}
	return out.String()
}

func TestSaidOnPages(t *testing.T) {
	var none *Page
	if none.Trace("", 0) != nil || none.Path() != "" || none.WriteResult("", 0) != nil || none.WriteOffload(Offload{}) != nil || none.WritePools(nil) != nil || none.WriteCopies(Result{}) != nil {
		t.Error("a page that is not wanted does something")
	}
	var b strings.Builder
	page := func(write func(p *Page) error) {
		p := &Page{Title: "a title", Command: "a command", Version: "a version", File: filepath.Join(t.TempDir(), "page.html")}
		if err := write(p); err != nil || p.Path() != p.File {
			t.Fatal(p.Path(), err)
		}
		b.WriteString(shown(t, p.File))
	}
	events := func(p *Page) {
		s := p.Trace("compute", 77)
		s.Emit(trace.Event{Kind: trace.Alloc, Name: linkOwner, Bytes: 1000})
		s.Emit(trace.Event{Kind: trace.Alloc, Name: "mine", Bytes: 10})
	}
	page(func(p *Page) error { return p.WriteResult("a result", number[Replay]()) })
	page(func(p *Page) error { events(p); return p.WriteResult("a result", number[Stash]()) })
	for _, said := range []float64{0, 5} {
		page(func(p *Page) error {
			events(p)
			o := number[Offload]()
			o.PredictedMS = said
			return p.WriteOffload(o)
		})
	}
	page(func(p *Page) error { r := number[Pools](); return p.WritePools(&r) })
	page(func(p *Page) error { return p.WriteCopies(number[Result]()) })
	golden.Check(t, "pages.txt", b.String())
	var seen []string
	a := sinkFunc(func(e trace.Event) { seen = append(seen, "a"+e.Name) })
	c := sinkFunc(func(e trace.Event) { seen = append(seen, "c"+e.Name) })
	BothSinks(a, c).Emit(trace.Event{Name: "1"})
	BothSinks(a, nil).Emit(trace.Event{Name: "2"})
	BothSinks(nil, c).Emit(trace.Event{Name: "3"})
	if got := fmt.Sprint(seen); got != "[a1 c1 a2 c3]" || Observe(nil) != nil {
		t.Errorf("sinks saw %s", got)
	}
}

type sinkFunc func(trace.Event)

func (f sinkFunc) Emit(e trace.Event) { f(e) }
