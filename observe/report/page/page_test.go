package page

import (
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/internal/pagestyle"
	"github.com/stowage-dev/stowage/observe/report"
)

func html(t *testing.T, r *report.Report) string {
	t.Helper()
	var page bytes.Buffer
	if err := Write(&page, r); err != nil {
		t.Fatal(err)
	}
	return page.String()
}

// unpack reads a block as the page does.
func unpack(t *testing.T, page, id string, value any) {
	t.Helper()
	m := regexp.MustCompile(`<script type="text/plain" id="` + id + `">([^<]*)</script>`).FindStringSubmatch(page)
	if m == nil {
		t.Fatalf("there is no block %s", id)
	}
	raw, err := base64.StdEncoding.DecodeString(m[1])
	if err != nil {
		t.Fatal(err)
	}
	z, err := gzip.NewReader(bytes.NewReader(raw))
	if err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(z)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, value); err != nil {
		t.Fatal(err)
	}
}

// full takes some bytes and then no more.
type full int

func (f *full) Write(b []byte) (int, error) {
	n := min(len(b), int(*f))
	*f -= full(n)
	if n < len(b) {
		return n, io.ErrShortWrite
	}
	return n, nil
}

// A page that cannot be written to its end is an error, wherever the room ends.
func TestPageThatCannotBeWritten(t *testing.T) {
	r := sample([]string{"keep"}, 1, 1, 2)
	for name, write := range map[string]func(io.Writer) error{"a report": func(w io.Writer) error { return Write(w, r) }, "a live page": Live} {
		var whole bytes.Buffer
		if err := write(&whole); err != nil {
			t.Fatal(err)
		}
		for _, room := range []int{0, 1, whole.Len() / 2, whole.Len() - 1} {
			if f := full(room); !errors.Is(write(&f), io.ErrShortWrite) {
				t.Errorf("%s of %d bytes fits into %d", name, whole.Len(), room)
			}
		}
	}
}

// SPEC S6.5: the page has all figures and asks nobody for anything.
func TestPageStandsAlone(t *testing.T) {
	r := sample([]string{"keep", "offload"}, 2, 2, 10)
	page := html(t, r)
	var head report.Report
	unpack(t, page, "report", &head)
	if head.Title != r.Title || len(head.Runs) != 2 || !reflect.DeepEqual(head.Runs[1].Steps, r.Runs[1].Steps) {
		t.Error("the head of the report is not what was written")
	}
	if got := head.Runs[0].Ranks[1]; len(got.Memory.Time) != 0 || got.Memory.Peak != r.Runs[0].Ranks[1].Memory.Peak {
		t.Error("a rank's figures are in the head, which every reader waits for")
	}
	var rank report.Rank
	unpack(t, page, "rank-1-1", &rank)
	if !reflect.DeepEqual(rank.Details, r.Runs[1].Ranks[1].Details) || !reflect.DeepEqual(rank.Memory, r.Runs[1].Ranks[1].Memory) {
		t.Error("a rank's figures are not what was written")
	}
	for _, bad := range []string{"unsafe-inline", "unsafe-eval", "connect-src", " src=", "@import", "url("} {
		if strings.Contains(page, bad) {
			t.Errorf("the page has %q in it", bad)
		}
	}
	if !strings.Contains(page, "Permission is hereby granted, free of charge") {
		t.Error("uPlot's licence does not go with it")
	}
}

// The policy names the elements that may run by their content; one that ends early would
// let the rest out as text.
func TestPolicyMatches(t *testing.T) {
	var live bytes.Buffer
	if err := Live(&live); err != nil {
		t.Fatal(err)
	}
	for name, page := range map[string]string{"file": html(t, sample([]string{"keep"}, 1, 1, 5)), "live": live.String()} {
		policy := regexp.MustCompile(`Content-Security-Policy" content="([^"]*)"`).FindStringSubmatch(page)[1]
		policy = strings.NewReplacer("&#39;", "'", "&#43;", "+").Replace(policy)
		elements := regexp.MustCompile(`(?s)<(style|script)>(.*?)</(style|script)>`).FindAllStringSubmatch(page, -1)
		if len(elements) != 3 {
			t.Errorf("%s: %d elements of styles and scripts, want 3", name, len(elements))
		}
		for _, e := range elements {
			if !strings.Contains(policy, hash(e[2])) {
				t.Errorf("%s: the policy does not allow the page's own %s", name, e[1])
			}
		}
		if got := strings.Contains(policy, "connect-src 'self'"); got != (name == "live") {
			t.Errorf("%s: may connect is %v", name, got)
		}
	}
}

// Names of the data never become a part of the page, whatever they are.
// What is shown of a rank before it is selected is in the first block.
func TestFirstBlock(t *testing.T) {
	r := &report.Report{Runs: []report.Run{{Ranks: []report.Rank{{Rank: 3, Budget: 4, Dropped: 5, Memory: report.Memory{Peak: report.Peak{Bytes: 6, Host: 7, Step: 8}}}}}}}
	page := html(t, r)
	var head report.Report
	var rank report.Rank
	unpack(t, page, "report", &head)
	unpack(t, page, "rank-0-0", &rank)
	for _, k := range []report.Rank{head.Runs[0].Ranks[0], rank} {
		if k.Rank != 3 || k.Budget != 4 || k.Dropped != 5 || k.Memory.Peak != r.Runs[0].Ranks[0].Memory.Peak {
			t.Errorf("%+v", k)
		}
	}
}

func TestNamesStayData(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		evil := rapid.SampledFrom([]string{"</script>", "<!--", "<img src=x>", "\"'>", "{{.}}", "</title>"}).Draw(t, "evil") + rapid.String().Draw(t, "rest") + "that is no part"
		var page bytes.Buffer
		r := &report.Report{Title: evil, Runs: []report.Run{{Name: evil, Command: evil, Ranks: []report.Rank{{Policy: []report.PolicyRow{{Group: evil}}}}}}}
		if err := Write(&page, r); err != nil {
			t.Fatal(err)
		}
		// The title twice, escaped; the rest in base64.
		if strings.Contains(evil, "<") && strings.Contains(page.String(), evil) {
			t.Fatalf("%q is in the page as it is", evil)
		}
	})
}

func TestFiguresThatAreNone(t *testing.T) {
	r := sample([]string{"keep"}, 1, 1, 5)
	r.Runs[0].Steps.Loss[0] = math.NaN()
	if err := Write(io.Discard, r); err == nil || !strings.Contains(err.Error(), "report page") {
		t.Errorf("a loss that is not a number gives %v", err)
	}
}

// contrast follows WCAG 2.
func contrast(a, b string) float64 {
	luminance := func(c [3]float64) float64 { return 0.2126*c[0] + 0.7152*c[1] + 0.0722*c[2] }
	x, y := luminance(linear(a)), luminance(linear(b))
	return (max(x, y) + 0.05) / (min(x, y) + 0.05)
}

// themes reads the colours of the style sheet.
func themes(t *testing.T) map[string]map[string]string {
	t.Helper()
	light, dark, ok := strings.Cut(pagestyle.Theme(), `:root[data-theme="dark"]`)
	if !ok {
		t.Fatal("there is no dark theme")
	}
	out := map[string]map[string]string{"light": {}, "dark": {}}
	for theme, text := range map[string]string{"light": light, "dark": dark} {
		for _, m := range regexp.MustCompile(`--([\w-]+): (#[0-9a-f]{6})\b`).FindAllStringSubmatch(text, -1) {
			out[theme][m[1]] = m[2]
		}
	}
	return out
}

// linear gives red, green and blue as amounts of light.
func linear(hex string) (out [3]float64) {
	for i := range out {
		n, _ := strconv.ParseUint(hex[1+2*i:3+2*i], 16, 8)
		if v := float64(n) / 255; v <= 0.04045 {
			out[i] = v / 12.92
		} else {
			out[i] = math.Pow((v+0.055)/1.055, 2.4)
		}
	}
	return out
}

// lab is CIE L*a*b*, in which distances are what eyes see.
func lab(c [3]float64) [3]float64 {
	f := func(v float64) float64 {
		if v = max(v, 0); v > 0.008856 {
			return math.Cbrt(v)
		}
		return 7.787*v + 16.0/116
	}
	x, y, z := f((0.4124*c[0]+0.3576*c[1]+0.1805*c[2])/0.95047), f(0.2126*c[0]+0.7152*c[1]+0.0722*c[2]), f((0.0193*c[0]+0.1192*c[1]+0.9505*c[2])/1.08883)
	return [3]float64{116*y - 16, 500 * (x - y), 200 * (y - z)}
}

// eyes are what remains of light for people without one sort of cones, after Machado,
// Oliveira and Fernandes (2009), severity 1.
var eyes = map[string][3][3]float64{
	"all cones": {{1, 0, 0}, {0, 1, 0}, {0, 0, 1}},
	"no red":    {{0.152286, 1.052583, -0.204868}, {0.114503, 0.786281, 0.099216}, {-0.003882, -0.048116, 1.051998}},
	"no green":  {{0.367322, 0.860646, -0.227968}, {0.280085, 0.672501, 0.047413}, {-0.011820, 0.042940, 0.968881}},
	"no blue":   {{1.255528, -0.076749, -0.178779}, {-0.078411, 0.930809, 0.147602}, {0.004733, 0.691367, 0.303900}},
}

// Any two of the hues of groups are told apart, whatever cones an eye has: a distance of 2
// is just seen, 12 at a glance.
func TestHuesDiffer(t *testing.T) {
	for theme, colors := range themes(t) {
		for who, eye := range eyes {
			var seen [12][3]float64
			for i := range seen {
				var c [3]float64
				for k, light := range linear(colors[fmt.Sprintf("g%d", i)]) {
					for n := range c {
						c[n] += eye[n][k] * light
					}
				}
				seen[i] = lab(c)
				for j := range i {
					a, b := seen[i], seen[j]
					if d := math.Sqrt((a[0]-b[0])*(a[0]-b[0]) + (a[1]-b[1])*(a[1]-b[1]) + (a[2]-b[2])*(a[2]-b[2])); d < 12 {
						t.Errorf("%s, %s: g%d and g%d are only %.1f apart", theme, who, i, j, d)
					}
				}
			}
		}
	}
}

// Colours of both themes are seen against their background: words by 4.5, shapes by 3,
// as WCAG 2 asks.
func TestContrast(t *testing.T) {
	for theme, colors := range themes(t) {
		check := func(front, back string, want float64) {
			if got := contrast(colors[front], colors[back]); got < want {
				t.Errorf("%s: %s on %s has a contrast of %.2f, want %.1f", theme, front, back, got, want)
			}
		}
		for _, word := range []string{"ink", "soft", "accent", "good", "bad", "budget"} {
			for _, back := range []string{"panel", "bg", "rail"} {
				if (word == "accent" || word == "budget" || word == "good" || word == "bad") && back == "rail" {
					continue // no such words there
				}
				check(word, back, 4.5)
			}
		}
		check("accent", "accent-weak", 4.5)
		check("ink", "accent-weak", 4.5)
		for i := range 12 {
			check(fmt.Sprintf("g%d", i), "panel", 3)
		}
		for i := range 6 {
			check(fmt.Sprintf("o%d", i), "panel", 3)
		}
		for _, kind := range []string{"launch", "copy", "graph", "work"} {
			check("k-"+kind, "panel", 3)
			check("on-span", "k-"+kind, 4.5)
			check("on-span", "k-"+kind+"2", 4.5)
		}
	}
}
